// Products of many tokens with a matrix of weights, both rounded to whole numbers of 14 bits, 32
// with a scale each. Machines with VNNI multiply and add twice as many such numbers in a step as
// floats, and 32 products of them still fit into 32 bits. AVX-512 only.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm/i16_panels.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/bf16/pack-inl.h"
#include "kernels/cpu/kernels-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kUnit = kI16Unit;
constexpr float kMost = 8191.0f;  // kUnit * kMost^2 < 2^31
static_assert(kUnit == kDepth && kI16PanelRows == kSide);

// target [kUnit] = x [n], n up to kUnit, over what is returned, the scale; zeros beyond n. What is
// not finite gives NaN.
HWY_INLINE float RoundUnit(const float* x, int n, std::int16_t* target) {
  const DF d;
  VF half[2];
  VF largest = hn::Zero(d);
  VF nothing = hn::Zero(d);  // NaN if anything is not finite
  for (int h = 0; h < 2; ++h) {
    const int left = std::clamp(n - h * kLanes, 0, kLanes);
    half[h] = hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(left)), d,
                             x + (left > 0 ? h * kLanes : 0));
    largest = hn::Max(largest, hn::Abs(half[h]));
    nothing = hn::Add(nothing, hn::Sub(half[h], half[h]));
  }
  if (!hn::AllTrue(d, hn::Eq(nothing, nothing))) {
    std::memset(target, 0, sizeof(std::int16_t) * kUnit);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
  const VF inverse = hn::Set(d, most > 0.0f ? kMost / most : 0.0f);
  for (int h = 0; h < 2; ++h) {
    const __m512i whole = _mm512_cvtps_epi32(hn::Mul(half[h], inverse).raw);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + h * kLanes),
                        _mm512_cvtepi32_epi16(whole));
  }
  return most / kMost;
}

// sum += products of pairs, of which two are added. gcc 12 copies all sums twice in every turn of a
// loop if the intrinsic is used.
HWY_INLINE void AddPairs(__m512i& sum, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Some tokens and 32 rows, their sums in registers.
template <int kTokens>
HWY_INLINE void MultiplyTokens(const I16PanelArgs& args, int first) {
  constexpr int kPairs = kUnit / 2;
  const std::int64_t column = std::int64_t{args.steps} * kTileSize;
  __mmask16 mask[2];
  for (int v = 0; v < 2; ++v) {
    const int rows = std::clamp(args.rows - v * kLanes, 0, kLanes);
    mask[v] = static_cast<__mmask16>((1U << rows) - 1);
  }
  __m512 sum[kTokens][2];
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    const float* c = args.c + (first + t) * args.c_stride;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      sum[t][v] = args.add ? _mm512_maskz_loadu_ps(mask[v], c + v * kLanes) : _mm512_setzero_ps();
    }
  }
  for (int s = 0; s < args.steps; ++s) {
    const std::int16_t* x = args.tokens_in_i16 + (std::int64_t{s} * kI16Tokens + first) * kUnit;
    const std::uint16_t* w = args.tiles + std::int64_t{s} * kTileSize;
    __m512i whole[kTokens][2];
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) whole[t][0] = whole[t][1] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int k = 0; k < kPairs; ++k) {
      const __m512i left = _mm512_load_si512(w + k * kSide);
      const __m512i right = _mm512_load_si512(w + column + k * kSide);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        std::int32_t bits;
        std::memcpy(&bits, x + t * kUnit + 2 * k, sizeof(bits));
        const __m512i pair = _mm512_set1_epi32(bits);
        AddPairs(whole[t][0], left, pair);
        AddPairs(whole[t][1], right, pair);
      }
    }
    const float* scales = args.scales + s * kSide;
    const __m512 left = _mm512_load_ps(scales);
    const __m512 right = _mm512_load_ps(scales + kLanes);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const __m512 scale = _mm512_set1_ps(args.token_scales[s * kI16Tokens + first + t]);
      sum[t][0] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[t][0]), _mm512_mul_ps(left, scale), sum[t][0]);
      sum[t][1] =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[t][1]), _mm512_mul_ps(right, scale), sum[t][1]);
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t) {
    float* c = args.c + (first + t) * args.c_stride;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) _mm512_mask_storeu_ps(c + v * kLanes, mask[v], sum[t][v]);
  }
}

void RoundTokensToI16(const I16TokensArgs& args) noexcept {
  for (int t = 0; t < args.tokens; ++t) {
    for (int i = 0; i < args.columns; i += kUnit) {
      const std::int64_t at = std::int64_t{i / kUnit} * kI16Tokens + t;
      args.scales[at] = RoundUnit(args.x + t * args.x_stride + i, std::min(kUnit, args.columns - i),
                                  args.target + at * kUnit);
    }
  }
}

void PackI16Panel(const I16PackArgs& args) noexcept {
  const int padded = RoundUp(args.depth, kUnit);
  const Bits* rows[kSide];
  for (int r = 0; r < kSide; ++r) {
    Bits* rounded = args.scratch + r * padded;
    rows[r] = rounded;
    for (int i = 0; i < args.depth; i += kUnit) {
      const int n = r < args.rows ? std::min(kUnit, args.depth - i) : 0;
      args.scales[i / kUnit * kSide + r] =
          RoundUnit(args.source + (n > 0 ? r * args.stride + i : 0), n,
                    reinterpret_cast<std::int16_t*>(rounded + i));
    }
  }
  PackColumns(rows, padded, args.tiles);
  PackColumns(rows + kTileRows, padded, args.tiles + kTileRows * padded);
}

void MultiplyI16Panel(const I16PanelArgs& args) noexcept {
  int t = 0;
  for (; t + 6 <= args.tokens; t += 6) MultiplyTokens<6>(args, t);
  // The same operations on each token, and so the same bits.
  for (; t + 2 <= args.tokens; t += 2) MultiplyTokens<2>(args, t);
  if (t < args.tokens) MultiplyTokens<1>(args, t);
}

constexpr I16Kernels kKernels{.round_tokens = RoundTokensToI16,
                              .pack_panel = PackI16Panel,
                              .multiply_panel = MultiplyI16Panel};

}  // namespace

const I16Kernels* FindI16Kernels() noexcept {
  return __builtin_cpu_supports("avx512vnni") != 0 ? &kKernels : nullptr;
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#else

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

const I16Kernels* FindI16Kernels() noexcept { return nullptr; }

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
