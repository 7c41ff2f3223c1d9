// Scores of q8_0 keys with queries that are rounded to 8 bits, too. Machines with VNNI multiply and
// add 64 pairs of such numbers in one step, those with AMX all of a block, which leaves more time
// for memory. AVX-512 only. Included once per target.

#if defined(TREELINE_KERNELS_CPU_INT8_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_INT8_SCORES_INL_H_
#undef TREELINE_KERNELS_CPU_INT8_SCORES_INL_H_
#else
#define TREELINE_KERNELS_CPU_INT8_SCORES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/int8/product.h"
#include "kernels/cpu/slab-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

static_assert(int8::kUnit == Q8Block::kElements && int8::kKeys == kBlock &&
              int8::kRows == kSlabRows);

// x[0, n), n up to int8::kUnit, as 8-bit numbers times what is returned: NaN unless all are finite.
inline float RoundUnit(const float* x, int n, std::int8_t* values) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::abs(x[i]));
  }
  constexpr float kMost = 127.0f;
  const float inverse = finite && largest > 0.0f ? kMost / largest : 0.0f;
  for (int i = 0; i < int8::kUnit; ++i) {
    const float scaled = i < n && inverse > 0.0f ? x[i] * inverse : 0.0f;
    values[i] = static_cast<std::int8_t>(std::lrint(std::clamp(scaled, -kMost, kMost)));
  }
  return finite ? largest / kMost : std::numeric_limits<float>::quiet_NaN();
}

// Two units of a query row: 64 elements, as the lanes of a register have them.
struct alignas(64) Int8Query {
  static constexpr int kUnit = int8::kUnit;
  static constexpr int kElements = 2 * kUnit;

  std::int8_t values[kElements];
  // Keys are made unsigned, by adding 128, because the instruction wants one side so: this takes
  // off again what that adds to each lane.
  std::int32_t offsets[kLanes];
  float scales[kLanes];

  // row[0, n), n up to kElements.
  void Round(const float* row, int n) {
    for (int unit = 0; unit < 2; ++unit) {
      const int begin = unit * kUnit;
      const float scale = RoundUnit(row + begin, std::clamp(n - begin, 0, kUnit), values + begin);
      for (int lane = unit * kLanes / 2; lane < (unit + 1) * kLanes / 2; ++lane) {
        std::int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += values[lane * 4 + i];
        offsets[lane] = -128 * sum;
        scales[lane] = scale;
      }
    }
  }
};

// Whether the CPU can compute Int8Scores.
inline bool HasInt8Products() { return __builtin_cpu_supports("avx512vnni") != 0; }

// Of a slab whose rows are rounded: query [kSlabRows, pairs of units]. Needs
// HasInt8Products().
__attribute__((target("avx512vnni"))) inline void Int8Scores(const Int8Query* query, int head_dim,
                                                             const BlockRows& k,
                                                             const UnitScales& k_scales,
                                                             float* scores) {
  constexpr int kUnit = Int8Query::kUnit;
  const int units = (head_dim + kUnit - 1) / kUnit;
  const int pairs = (units + 1) / 2;
  const __m512i signs = _mm512_set1_epi8(-128);
  for (int key = 0; key < kBlock; key += kTileKeys) {
    if (k.fetch != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < kTileKeys; ++j) {
        PrefetchRow(k.fetch[key + j] + k.fetch_offset, k.fetch_bytes);
      }
    }
    __m512 sum[kTileKeys][kSlabRows];
#pragma GCC unroll 4
    for (int j = 0; j < kTileKeys; ++j) {
#pragma GCC unroll 4
      for (int r = 0; r < kSlabRows; ++r) sum[j][r] = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < pairs; ++pair) {
      const bool both = 2 * pair + 1 < units;
#pragma GCC unroll 4
      for (int j = 0; j < kTileKeys; ++j) {
        const auto* block = reinterpret_cast<const Q8Block*>(k.rows[key + j] + k.offset) + 2 * pair;
        const float* scale = k_scales.of + 2 * pair * kBlock + key + j;
        __m512i values = _mm512_castsi256_si512(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block->values)));
        __m512 scales = _mm512_maskz_broadcastss_ps(0x00FF, _mm_load_ss(scale));
        if (both) {
          values = _mm512_inserti64x4(
              values, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block[1].values)), 1);
          scales = _mm512_mask_broadcastss_ps(scales, 0xFF00, _mm_load_ss(scale + kBlock));
        }
        values = _mm512_xor_si512(values, signs);
#pragma GCC unroll 4
        for (int r = 0; r < kSlabRows; ++r) {
          const Int8Query& q = query[r * pairs + pair];
          const __m512i products = _mm512_dpbusd_epi32(_mm512_load_si512(q.offsets), values,
                                                       _mm512_load_si512(q.values));
          const __m512 scaled = _mm512_mul_ps(scales, _mm512_load_ps(q.scales));
          sum[j][r] = _mm512_fmadd_ps(scaled, _mm512_cvtepi32_ps(products), sum[j][r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kTileKeys; ++j) {
      StoreSums(VF{sum[j][0]}, VF{sum[j][1]}, VF{sum[j][2]}, VF{sum[j][3]},
                scores + (key + j) * kSlabRows);
    }
  }
}

// A unit of the rows of a slab, as int8::Product wants it.
struct alignas(64) Int8SlabUnit {
  std::int8_t values[int8::kQueryUnit];
  float scales[kLanes];  // lane i is of row i % kSlabRows

  // x[0, n) is the unit of a row.
  void Round(const float* x, int n, int row) {
    std::int8_t rounded[int8::kUnit];
    const float scale = RoundUnit(x, n, rounded);
    for (int i = 0; i < int8::kUnit; ++i) {
      const int group = i / int8::kTogether;
      values[(group * kSlabRows + row) * int8::kTogether + i % int8::kTogether] = rounded[i];
    }
    for (int lane = row; lane < kLanes; lane += kSlabRows) scales[lane] = scale;
  }
};

// Makes scores of a slab by a machine's products of bytes.
class Int8SlabScores {
 public:
  explicit Int8SlabScores(int head_dim)
      : units_((head_dim + int8::kUnit - 1) / int8::kUnit),
        row_bytes_(units_ * static_cast<int>(sizeof(Q8Block))) {}

  // Multiplies keys with a slab, whose query is [unit]. Rows of keys that do not lie at equal
  // distances are copied first. What comes between this and Finish() hides that products take their
  // time.
  HWY_INLINE void Start(const int8::Multiplier& multiplier, const Int8SlabUnit* query,
                        const BlockRows& k) {
    multiplier.multiply({.keys = Rows(k) + offsetof(Q8Block, values),
                         .key_stride = stride_,
                         .unit_stride = sizeof(Q8Block),
                         .query = query->values,
                         .query_stride = sizeof(Int8SlabUnit),
                         .units = units_,
                         .sums = sums_});
  }

  // Scores of what was started.
  HWY_INLINE void Finish(const Int8SlabUnit* query, const UnitScales& k_scales, float* scores) {
    const DF d;
    const hn::RebindToSigned<DF> di;
#pragma GCC unroll 4
    for (int s = 0; s < kSlabRows; ++s) {
      // Lane i is of key (s * kLanes + i) / kSlabRows.
      const auto keys = hn::IndicesFromVec(
          d, hn::ShiftRight<2>(hn::Iota(di, static_cast<std::int32_t>(s * kLanes))));
      VF sum = hn::Zero(d);
      for (int u = 0; u < units_; ++u) {
        const VF key_scales = hn::TableLookupLanes(hn::Load(d, k_scales.of + u * kBlock), keys);
        const VF scales = hn::Mul(key_scales, hn::Load(d, query[u].scales));
        const auto products = hn::Load(di, sums_ + u * int8::kUnitSums + s * kLanes);
        sum = hn::MulAdd(scales, hn::ConvertTo(d, products), sum);
      }
      hn::Store(sum, d, scores + s * kLanes);
    }
  }

 private:
  static constexpr int kMostBytes = UnitScales::kUnits * static_cast<int>(sizeof(Q8Block));
  static constexpr int kMostStride = (kMostBytes + 63) / 64 * 64;

  // The first of rows that are stride_ apart.
  HWY_INLINE const std::byte* Rows(const BlockRows& k) {
    // Distances between numbers, since rows may be in pages that have nothing to do with each other.
    const auto distance = [&](int j) HWY_ATTR {
      return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(k.rows[j]) -
                                       reinterpret_cast<std::uintptr_t>(k.rows[j - 1]));
    };
    stride_ = distance(1);
    bool even = true;
    for (int j = 2; j < kBlock; ++j) even = even && distance(j) == stride_;
    if (even) return k.rows[0] + k.offset;
    stride_ = (row_bytes_ + 63) / 64 * 64;
    for (int j = 0; j < kBlock; ++j) {
      const std::byte* row = k.rows[j] + k.offset;
      std::byte* copy = copies_ + j * stride_;
      int at = 0;
      for (; at + 64 <= row_bytes_; at += 64) {
        _mm512_store_si512(copy + at, _mm512_loadu_si512(row + at));
      }
      const __mmask64 rest = (std::uint64_t{1} << (row_bytes_ - at)) - 1;
      _mm512_mask_storeu_epi8(copy + at, rest, _mm512_maskz_loadu_epi8(rest, row + at));
    }
    return copies_;
  }

  const int units_;
  const int row_bytes_;
  std::int64_t stride_ = 0;
  HWY_ALIGN std::byte copies_[kBlock * kMostStride];
  HWY_ALIGN std::int32_t sums_[UnitScales::kUnits * int8::kUnitSums];
};

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
#endif  // include guard per target
