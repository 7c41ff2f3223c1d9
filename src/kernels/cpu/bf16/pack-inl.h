// Rows of bf16 made into the tiles of product.h, f32 rounded to bf16, and powers of two as exact as
// that. AVX-512 only. Included once per target.

#if defined(TREELINE_KERNELS_CPU_BF16_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_BF16_PACK_INL_H_
#undef TREELINE_KERNELS_CPU_BF16_PACK_INL_H_
#else
#define TREELINE_KERNELS_CPU_BF16_PACK_INL_H_
#endif

#include <algorithm>

#include "kernels/cpu/bf16/product.h"
#include "kernels/cpu/simd-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

using bf16::kDepth;
using bf16::kSide;
using bf16::kTileRows;
using bf16::kTileSize;
using Bits = std::uint16_t;  // a bf16 number

using DU = hn::RebindToUnsigned<DF>;
using D16 = hn::Repartition<Bits, DF>;

inline int RoundUp(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// The upper half of each lane is x in bf16, halves rounded away from zero. A NaN stays one, unless
// it is a signalling one that no arithmetic has touched.
HWY_INLINE hn::Vec<DU> RoundUpperHalf(VF x) {
  const DU du;
  const auto bits = hn::BitCast(du, x);
  const auto number = hn::RebindMask(du, hn::Eq(x, x));
  return hn::IfThenElse(number, hn::Add(bits, hn::Set(du, 0x8000)), bits);
}

// 32 numbers of two vectors, in order.
HWY_INLINE hn::Vec<D16> Round(VF low, VF high) {
  const D16 d16;
  return hn::ConcatOdd(d16, hn::BitCast(d16, RoundUpperHalf(high)),
                       hn::BitCast(d16, RoundUpperHalf(low)));
}

// Lane i becomes the pair (first[i], second[i]). The lower halves of a NaN's bits must be zeros, as
// they are in what comes from bf16 inputs; otherwise it may come out as a number.
HWY_INLINE hn::Vec<DU> RoundPairs(VF first, VF second) {
  const DU du;
  const auto half = hn::Set(du, 0x8000);
  const auto low = hn::ShiftRight<16>(hn::Add(hn::BitCast(du, first), half));
  const auto high = hn::Add(hn::BitCast(du, second), half);
  return hn::Vec<DU>{_mm512_mask_blend_epi16(0xAAAAAAAA, low.raw, high.raw)};
}

// 2^y for y <= kLag, with a relative error of 7.5e-5: less than what rounding to bf16 makes of it.
// 0 below 2^-126. A NaN stays a NaN.
HWY_INLINE VF Exp2ForBf16(VF y) {
  const DF d;
  const VF whole{_mm512_roundscale_ps(y.raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  const VF f = hn::Sub(y, whole);
  VF p = hn::Set(d, 0.05517167f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.24261112f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.69326099f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.99992807f));
  const __mmask16 counts = _mm512_cmp_ps_mask(y.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return VF{_mm512_maskz_scalef_ps(counts, p.raw, whole.raw)};
}

// target[0, n) = source, rounded; zeros up to the next multiple of kDepth.
inline void RoundRow(const float* source, int n, Bits* target) {
  const DF d;
  const D16 d16;
  for (int i = 0; i < n; i += kDepth) {
    VF half[2];
    for (int h = 0; h < 2; ++h) {
      const int left = std::clamp(n - i - h * kLanes, 0, kLanes);
      half[h] = hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(left)), d,
                               source + (left > 0 ? i + h * kLanes : 0));
    }
    hn::StoreU(Round(half[0], half[1]), d16, target + i);
  }
}

// The same as the sum of two: what rounding leaves is rounded, too. An infinity, or what rounds to
// one, has nothing left.
inline void SplitRow(const float* source, int n, Bits* high, Bits* low) {
  const DF d;
  const DU du;
  const D16 d16;
  for (int i = 0; i < n; i += kDepth) {
    hn::Vec<DU> first[2];
    hn::Vec<DU> second[2];
    for (int h = 0; h < 2; ++h) {
      const int left = std::clamp(n - i - h * kLanes, 0, kLanes);
      const VF x = hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(left)), d,
                                  source + (left > 0 ? i + h * kLanes : 0));
      first[h] = RoundUpperHalf(x);
      const VF rounded = hn::BitCast(d, hn::And(first[h], hn::Set(du, 0xFFFF0000U)));
      const VF rest = hn::IfThenZeroElse(hn::IsInf(rounded), hn::Sub(x, rounded));
      second[h] = RoundUpperHalf(rest);
    }
    hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, first[1]), hn::BitCast(d16, first[0])), d16,
               high + i);
    hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, second[1]), hn::BitCast(d16, second[0])), d16,
               low + i);
  }
}

// RoundRow; also the product of the rounded row with `other` [n].
inline float RoundRowAndMultiply(const float* source, const float* other, int n, Bits* target) {
  const DF d;
  const DU du;
  const D16 d16;
  VF sum = hn::Zero(d);
  for (int i = 0; i < n; i += kDepth) {
    hn::Vec<DU> half[2];
    for (int h = 0; h < 2; ++h) {
      const int left = std::clamp(n - i - h * kLanes, 0, kLanes);
      const auto some = hn::FirstN(d, static_cast<std::size_t>(left));
      const int from = left > 0 ? i + h * kLanes : 0;
      half[h] = RoundUpperHalf(hn::MaskedLoad(some, d, source + from));
      const VF rounded = hn::BitCast(d, hn::And(half[h], hn::Set(du, 0xFFFF0000U)));
      sum = hn::MulAdd(rounded, hn::MaskedLoad(some, d, other + from), sum);
    }
    hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, half[1]), hn::BitCast(d16, half[0])), d16,
               target + i);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// x[0, n) of bf16 bits are all finite.
inline bool AllFiniteBits(const Bits* x, int n) {
  const D16 d16;
  const auto exponent = hn::Set(d16, 0x7F80);
  for (int i = 0; i < n; i += kDepth) {
    const auto bits = hn::MaskedLoad(hn::FirstN(d16, static_cast<std::size_t>(n - i)), d16, x + i);
    if (!hn::AllFalse(d16, hn::Eq(hn::And(bits, exponent), exponent))) return false;
  }
  return true;
}

// Columns 2i and 2i + 1 of 16 rows of 32 elements become row i of a tile: a transposition of pairs.
HWY_INLINE void TransposePairs(const __m512i (&rows)[kTileRows], std::uint32_t* tile) {
  __m512i a[kTileRows];
  __m512i b[kTileRows];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  // b[4g + i] holds columns i, i + 4, i + 8, i + 12 of rows 4g to 4g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xDD);
    _mm512_storeu_si512(tile + i * kLanes, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(tile + (4 + i) * kLanes, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(tile + (8 + i) * kLanes, _mm512_shuffle_i32x4(even_low, even_high, 0xDD));
    _mm512_storeu_si512(tile + (12 + i) * kLanes, _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD));
  }
}

// Rows as columns of b: tiles [ceil(n / 32)] of 16 rows of n elements each.
inline void PackColumns(const Bits* const* rows, int n, Bits* tiles) {
  for (int i = 0; i < n; i += kDepth) {
    const int left = std::min(n - i, kDepth);
    const auto mask = static_cast<__mmask32>(left == kDepth ? ~0U : (1U << left) - 1);
    __m512i row[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) row[r] = _mm512_maskz_loadu_epi16(mask, rows[r] + i);
    TransposePairs(row, reinterpret_cast<std::uint32_t*>(tiles + i / kDepth * kTileSize));
  }
}

// Of 32 rows, which one is at place j in the rows that PackRows makes: i and i + 16 are a pair, so
// that two vectors of weights become one of pairs without being shuffled.
constexpr int PairedRow(int j) { return j / 2 + j % 2 * kTileRows; }
// The place of row i.
constexpr int PairedPlace(int i) { return i % kTileRows * 2 + i / kTileRows; }

// Rows as rows of b, in the order of PairedRow: tiles [ceil(n / 32) * 2] of 32 rows of n elements
// each.
inline void PackRows(const Bits* const* rows, int n, Bits* tiles) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int i = 0; i < RoundUp(n, kSide); i += kTileRows) {
    const int left = std::clamp(n - i, 0, kTileRows);
    const auto mask = static_cast<__mmask16>((1U << left) - 1);
    const int from = left > 0 ? i : 0;
    Bits* tile = tiles + i / kTileRows * kTileSize;
    for (int r = 0; r < kTileRows; ++r) {
      const __m256i low = _mm256_maskz_loadu_epi16(mask, rows[r] + from);
      const __m256i high = _mm256_maskz_loadu_epi16(mask, rows[kTileRows + r] + from);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      _mm512_storeu_si512(tile + r * kSide, _mm512_permutexvar_epi16(pairs, both));
    }
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
#endif  // include guard per target
