// Scores of q8_0 keys with queries that are rounded to 8 bits, too. Machines with VNNI multiply and
// add 64 pairs of such numbers in one step, which leaves more time for memory. AVX-512 only.
// Included once per target.

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

#include "kernels/cpu/slab-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

// Two units of a query row: 64 elements, as the lanes of a register have them.
struct alignas(64) Int8Query {
  static constexpr int kUnit = Q8Block::kElements;
  static constexpr int kElements = 2 * kUnit;

  std::int8_t values[kElements];
  // Keys are made unsigned, by adding 128, because the instruction wants one side so: this takes
  // off again what that adds to each lane.
  std::int32_t offsets[kLanes];
  float scales[kLanes];

  // row[0, n), n up to kElements, times what rounding needs to use all 8 bits. A unit that is not
  // finite gives NaN.
  void Round(const float* row, int n) {
    for (int unit = 0; unit < 2; ++unit) {
      const int begin = unit * kUnit;
      const int end = std::min(n, begin + kUnit);
      float largest = 0.0f;
      bool finite = true;
      for (int i = begin; i < end; ++i) {
        finite = finite && std::isfinite(row[i]);
        largest = std::max(largest, std::abs(row[i]));
      }
      constexpr float kMost = 127.0f;
      const float inverse = finite && largest > 0.0f ? kMost / largest : 0.0f;
      for (int i = begin; i < begin + kUnit; ++i) {
        const float x = i < end && inverse > 0.0f ? row[i] * inverse : 0.0f;
        values[i] = static_cast<std::int8_t>(std::lrint(std::clamp(x, -kMost, kMost)));
      }
      for (int lane = unit * kLanes / 2; lane < (unit + 1) * kLanes / 2; ++lane) {
        std::int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += values[lane * 4 + i];
        offsets[lane] = -128 * sum;
        scales[lane] = finite ? largest / kMost : std::numeric_limits<float>::quiet_NaN();
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

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
#endif  // include guard per target
