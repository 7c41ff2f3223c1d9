// One block of q8_0 keys and values and a slab of query rows in whole numbers: queries are rounded
// to 8 bits, as keys are, and weights to 14. AVX-512 only. Included once per target.

#if defined(TREELINE_KERNELS_CPU_INT8_SLAB_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_INT8_SLAB_INL_H_
#undef TREELINE_KERNELS_CPU_INT8_SLAB_INL_H_
#else
#define TREELINE_KERNELS_CPU_INT8_SLAB_INL_H_
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
  constexpr float kLeast = 1e-36f;  // below it there is no inverse
  const float inverse = finite && largest > kLeast ? kMost / largest : 0.0f;
  for (int i = 0; i < int8::kUnit; ++i) {
    const float scaled = i < n && inverse > 0.0f ? x[i] * inverse : 0.0f;
    values[i] = static_cast<std::int8_t>(std::lrint(std::clamp(scaled, -kMost, kMost)));
  }
  return finite ? largest / kMost : std::numeric_limits<float>::quiet_NaN();
}

// x[0, n) becomes a unit of a row.
inline void RoundInto(int8::QueryUnit& query, const float* x, int n, int row) {
  std::int8_t rounded[int8::kUnit];
  query.scales[row] = RoundUnit(x, n, rounded);
  std::int32_t sum = 0;
  for (int i = 0; i < int8::kUnit; ++i) {
    const int group = i / int8::kTogether;
    query.values[(group * kSlabRows + row) * int8::kTogether + i % int8::kTogether] = rounded[i];
    sum += rounded[i];
  }
  query.offsets[row] = -128 * sum;
}

// Scores of a block and sums of its weighted values, as SlabKernel makes them, by a machine's
// products of bytes.
class Int8Slab {
 public:
  Int8Slab(const AttentionSpec& spec, int v_dim)
      : units_(Units(spec.head_dim)),
        row_bytes_(units_ * static_cast<int>(sizeof(Q8Block))),
        v_units_(Units(spec.v_head_dim)),
        v_dim_(v_dim) {}

  static constexpr int Units(int dim) { return (dim + int8::kUnit - 1) / int8::kUnit; }

  // Multiplies keys with a slab, whose query is [unit]. Rows of keys that do not lie at equal
  // distances are copied first. What comes between this and Finish() hides that products take their
  // time.
  HWY_INLINE void Start(const int8::Multiplier& multiplier, const int8::QueryUnit* query,
                        const BlockRows& k) {
    const std::byte* rows = Rows(k) + offsetof(Q8Block, values);
    constexpr int kTogether = 2;  // AMX computes one while it loads another
    for (int u = 0; u < units_; u += kTogether) {
      const int count = std::min(kTogether, units_ - u);
      for (int i = u; i < u + count; ++i) FetchPart(k, i, units_);
      multiplier.multiply({.keys = rows + u * sizeof(Q8Block),
                           .key_stride = stride_,
                           .unit_stride = sizeof(Q8Block),
                           .query = query + u,
                           .units = count,
                           .sums = sums_ + u * int8::kUnitSums});
    }
  }

  // Scores of what was started.
  HWY_INLINE void Finish(const int8::QueryUnit* query, const UnitScales& k_scales, float* scores) {
    const DF d;
    const hn::RebindToSigned<DF> di;
    VF sum[kSlabRows];
#pragma GCC unroll 4
    for (VF& x : sum) x = hn::Zero(d);
    for (int u = 0; u < units_; ++u) {
      const VF as_they_are = hn::Load(d, k_scales.of + u * kBlock);
      // An infinite one becomes a NaN: elements of both signs give that, of which only the sum is
      // known here.
      const VF key_scales = hn::Add(as_they_are, hn::Sub(as_they_are, as_they_are));
      const VF query_scales = hn::LoadDup128(d, query[u].scales);
#pragma GCC unroll 4
      for (int s = 0; s < kSlabRows; ++s) {
        const VF scales = hn::Mul(OfKeys(key_scales, s), query_scales);
        const auto products = hn::Load(di, sums_ + u * int8::kUnitSums + s * kLanes);
        sum[s] = hn::MulAdd(scales, hn::ConvertTo(d, products), sum[s]);
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kSlabRows; ++s) hn::Store(sum[s], d, scores + s * kLanes);
  }

  // out[row] += sum over the first `keys` keys of weight * value; weights of what a row does not
  // see are 0. False, and nothing is done, if a weight or a scale is no finite number.
  HWY_INLINE bool Weigh(const int8::Multiplier& multiplier, const float* weights,
                        const UnitScales& v_scales, const BlockRows& v, int keys, float* out) {
    if (!AllFinite(weights, kWeights) || !AllFinite(v_scales.of, v_units_ * kBlock)) {
      return false;
    }
    const std::byte* rows[kBlock];
    for (int key = 0; key < kBlock; ++key) {
      rows[key] = v.rows[std::min(key, keys - 1)] + v.offset;
    }
    // All of them first: what a unit waits for is computed while others are.
    for (int u = 0; u < v_units_; ++u) RoundWeights(weights, v_scales, u);
    for (int u = 0; u < v_units_; ++u) {
      FetchPart(v, u, v_units_);
      multiplier.weigh({.values = rows,
                        .offset = LoadQ8::Offset(u * int8::kUnit),
                        .weights = weights_ + u * kWeights,
                        .scales = weight_scales_ + u * kSlabRows,
                        .out = out + u * int8::kUnit,
                        .out_stride = v_dim_});
    }
    return true;
  }

 private:
  static constexpr int kWeights = kBlock * kSlabRows;
  static constexpr int kMostBytes = UnitScales::kUnits * static_cast<int>(sizeof(Q8Block));
  static constexpr int kMostStride = (kMostBytes + 63) / 64 * 64;

  // Of the scales of a block's keys, those of keys from the (s * kLanes / kSlabRows)-th, each for
  // kSlabRows rows.
  static HWY_INLINE VF OfKeys(VF scales, int s) {
    const DF d;
    const auto first = static_cast<std::int32_t>(s * kLanes);
    const auto keys =
        hn::IndicesFromVec(d, hn::ShiftRight<2>(hn::Iota(hn::RebindToSigned<DF>(), first)));
    return hn::TableLookupLanes(scales, keys);
  }

  // The u-th part of the rows to fetch: a burst would fill the buffers of outstanding misses.
  static HWY_INLINE void FetchPart(const BlockRows& rows, int u, int units) {
    constexpr int kRows = 4;
    if (rows.fetch == nullptr || u * kRows >= kBlock) return;
    const int parts = u + 1 == units ? kBlock / kRows - u : 1;
    for (int part = u; part < u + parts; ++part) {
#pragma GCC unroll 4
      for (int i = part * kRows; i < (part + 1) * kRows; ++i) {
        PrefetchShortRow(rows.fetch[i] + rows.fetch_offset, rows.fetch_bytes);
      }
    }
  }

  // `n` is a multiple of kLanes.
  static HWY_INLINE bool AllFinite(const float* x, int n) {
    const DF d;
    const VF most = hn::Set(d, std::numeric_limits<float>::max());
    auto finite = hn::Le(hn::Abs(hn::Load(d, x)), most);
    for (int i = kLanes; i < n; i += kLanes) {
      finite = hn::And(finite, hn::Le(hn::Abs(hn::Load(d, x + i)), most));
    }
    return hn::AllTrue(d, finite);
  }

  // weights_ and weight_scales_ of a unit: its scales are the same for all of its elements, so they
  // become part of the weights.
  HWY_INLINE void RoundWeights(const float* weights, const UnitScales& v_scales, int unit) {
    const DF d;
    const VF scales = hn::Load(d, v_scales.of + unit * kBlock);
    VF scaled[kSlabRows];
    VF most = hn::Set(d, 0x1p-100f);
#pragma GCC unroll 4
    for (int s = 0; s < kSlabRows; ++s) {
      scaled[s] = hn::Mul(hn::Load(d, weights + s * kLanes), OfKeys(scales, s));
      most = hn::Max(most, hn::Abs(scaled[s]));
    }
    // Lanes of a row are kSlabRows apart.
    __m512 m = most.raw;
    m = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, _MM_SHUFFLE(2, 3, 0, 1)));
    // Powers of two: they scale and scale back without rounding.
    constexpr float kBits = 13;
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 places = _mm512_sub_ps(_mm512_set1_ps(kBits), _mm512_getexp_ps(m));
    const VF factor{_mm512_scalef_ps(one, places)};
    _mm_store_ps(
        weight_scales_ + unit * kSlabRows,
        _mm512_castps512_ps128(_mm512_scalef_ps(one, _mm512_sub_ps(_mm512_setzero_ps(), places))));
    __m512i rounded[kSlabRows];
#pragma GCC unroll 4
    for (int s = 0; s < kSlabRows; ++s) {
      rounded[s] = _mm512_cvtps_epi32(hn::Mul(scaled[s], factor).raw);
    }
    constexpr __mmask32 kSecond = 0xAAAAAAAA;  // of a pair
#pragma GCC unroll 2
    for (int s = 0; s < kSlabRows / 2; ++s) {
      const __m512i second = _mm512_slli_epi32(rounded[s + kSlabRows / 2], 16);
      _mm512_store_si512(weights_ + unit * kWeights + s * 2 * kLanes,
                         _mm512_mask_mov_epi16(rounded[s], kSecond, second));
    }
  }

  // The first of rows that are stride_ apart.
  HWY_INLINE const std::byte* Rows(const BlockRows& k) {
    // Distances between numbers, since rows may be in pages that have nothing to do with each
    // other.
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

  const int units_;  // of a key
  const int row_bytes_;
  const int v_units_;
  const int v_dim_;  // floats from row to row of the output
  std::int64_t stride_ = 0;
  HWY_ALIGN std::byte copies_[kBlock * kMostStride];
  HWY_ALIGN std::int16_t weights_[UnitScales::kUnits * kWeights];  // [unit, pair, row, 2]
  HWY_ALIGN float weight_scales_[UnitScales::kUnits * kSlabRows];  // [unit, row]
  HWY_ALIGN std::int32_t sums_[UnitScales::kUnits * int8::kUnitSums];
};

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
#endif  // include guard per target
