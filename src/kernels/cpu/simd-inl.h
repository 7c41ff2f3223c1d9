// Per-target building blocks: exp2, loading rows of any type, a register-tiled product.
// Included once per Highway target.

#if defined(TREELINE_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_SIMD_INL_H_
#undef TREELINE_KERNELS_CPU_SIMD_INL_H_
#else
#define TREELINE_KERNELS_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>
// After highway.h.
#include <hwy/contrib/math/math-inl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "treeline/dtype.h"
#include "treeline/spec.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using MF = hn::Mask<DF>;
inline constexpr int kLanes = hn::MaxLanes(DF());

// Register tiles are larger where there are 32 registers.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr bool kManyRegisters = true;
#else
inline constexpr bool kManyRegisters = false;
#endif

// Scores live in the log2 domain, where exp is cheapest.
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;
// The running maximum of a row that has seen no score; any finite score exceeds it.
inline constexpr float kNoScore = std::numeric_limits<float>::lowest();
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// A running maximum may lag behind by this much (a factor of 2^8) before sums are rescaled.
inline constexpr float kLag = 8.0f;

// Keeps a vector in a register: otherwise gcc repeats its load in every instruction that uses it.
HWY_INLINE void KeepInRegister([[maybe_unused]] VF& v) {
#if HWY_TARGET == HWY_AVX3
  asm("" : "+v"(v.raw));
#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
  asm("" : "+x"(v.raw));
#endif
}

// 2^y for y <= kLag, to 2 units in the last place; 0 below 2^-126. A NaN stays a NaN: it passes
// through the fraction, whatever Max and NearestInt make of it.
HWY_INLINE VF Exp2(VF y) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const auto i = hn::NearestInt(hn::Max(y, hn::Set(d, -126.0f)));
  const VF f = hn::Sub(y, hn::ConvertTo(d, i));
  // Minimax on [-1/2, 1/2], relative error 9e-8.
  VF p = hn::Set(d, 0.001326472731307149f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.009671512991189957f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.05550733581185341f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022242426872253f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931470036506653f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(i, hn::Set(di, 127))));
  return hn::IfThenZeroElse(hn::Lt(y, hn::Set(d, -126.0f)), hn::Mul(p, power));
}

// How raw products become scores: s = raw, or cap * tanh(raw), in the log2 domain. Queries are
// multiplied by `query_scale` beforehand.
struct ScoreMap {
  explicit ScoreMap(const AttentionSpec& spec)
      : query_scale(spec.softcap > 0.0f ? spec.scale / spec.softcap : spec.scale * kLog2E),
        cap(spec.softcap * kLog2E),
        has_cap(spec.softcap > 0.0f),
        has_alibi(!spec.alibi_slopes.empty()) {}

  bool plain() const { return !has_cap && !has_alibi; }

  float query_scale;
  float cap;
  bool has_cap;
  bool has_alibi;
};

// Sums of the lanes of four vectors.
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void StoreSums(VF a, VF b, VF c, VF e, float* sums) {
  sums[0] = hn::GetLane(a);
  sums[1] = hn::GetLane(b);
  sums[2] = hn::GetLane(c);
  sums[3] = hn::GetLane(e);
}
#else
template <class D, class V>
HWY_INLINE hn::Vec<hn::Full128<float>> FoldTo128(D /*d*/, V v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return FoldTo128(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

HWY_INLINE void StoreSums(VF a, VF b, VF c, VF e, float* sums) {
  const DF d;
  const hn::Repartition<double, DF> dd;
  const VF ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce));
  const auto high = hn::InterleaveUpper(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce));
  const VF folded = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));
  hn::StoreU(FoldTo128(d, folded), hn::Full128<float>(), sums);
}
#endif

// 16-bit floats as f32; they are loaded from memory, which is not aligned.
template <class D>
HWY_INLINE hn::Vec<D> LoadHalves(D d, const void* halves) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_NEON
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, static_cast<const hwy::float16_t*>(halves)));
#else
  // Without an instruction for it, Highway's way makes numbers of infinities and NaN.
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto bits = hn::PromoteTo(du, hn::LoadU(d16, static_cast<const std::uint16_t*>(halves)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000U)));
  const auto rest = hn::ShiftLeft<13>(hn::And(bits, hn::Set(du, 0x7FFFU)));
  // A finite number's exponent is 112 too low now.
  const auto number = hn::BitCast(du, hn::Mul(hn::BitCast(d, rest), hn::Set(d, 0x1p112f)));
  const auto none = hn::Or(rest, hn::Set(du, 0x7F800000U));
  const auto finite = hn::Lt(rest, hn::Set(du, 0x7C00U << 13));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(finite, number, none)));
#endif
}

// dst[0, dim) = row as f32. `dim` is a multiple of 8.
template <class D>
HWY_INLINE void WidenRow(D d, DType dtype, const std::byte* row, int begin, int end, float* dst) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  switch (dtype) {
    case DType::kF32: {
      const auto* source = reinterpret_cast<const float*>(row);
      for (int i = begin; i < end; i += lanes) hn::StoreU(hn::LoadU(d, source + i), d, dst + i);
      return;
    }
    case DType::kBF16: {
      const hn::RebindToUnsigned<D> du;
      const hn::Rebind<std::uint16_t, D> d16;
      const auto* source = reinterpret_cast<const std::uint16_t*>(row);
      for (int i = begin; i < end; i += lanes) {
        const auto wide = hn::PromoteTo(du, hn::LoadU(d16, source + i));
        hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(wide)), d, dst + i);
      }
      return;
    }
    case DType::kF16: {
      const auto* source = reinterpret_cast<const std::uint16_t*>(row);
      for (int i = begin; i < end; i += lanes) hn::StoreU(LoadHalves(d, source + i), d, dst + i);
      return;
    }
    case DType::kQ8_0: {
      const hn::Rebind<std::int8_t, D> d8;
      const hn::RebindToSigned<D> di;
      const auto* blocks = reinterpret_cast<const Q8Block*>(row);
      for (int i = begin; i < end; i += lanes) {
        const Q8Block& block = blocks[i / Q8Block::kElements];
        const auto scale = hn::Set(d, F32FromF16(block.scale));
        const auto values = hn::LoadU(d8, block.values + i % Q8Block::kElements);
        hn::StoreU(hn::Mul(scale, hn::ConvertTo(d, hn::PromoteTo(di, values))), d, dst + i);
      }
      return;
    }
  }
}

HWY_INLINE void WidenRow(DType dtype, const std::byte* row, int dim, float* dst) {
  const int whole = dim / kLanes * kLanes;
  WidenRow(DF(), dtype, row, 0, whole, dst);
  if (whole < dim) WidenRow(hn::CappedTag<float, 8>(), dtype, row, whole, dim, dst);
}

// Whether all of x[0, n) is finite. n is a multiple of kLanes.
HWY_INLINE bool AllFinite(const float* x, std::size_t n) {
  const DF d;
  // x - x is 0 for finite x and NaN otherwise, and a NaN never leaves a sum.
  VF sum = hn::Zero(d);
  for (std::size_t i = 0; i < n; i += kLanes) {
    const VF v = hn::Load(d, x + i);
    sum = hn::Add(sum, hn::Sub(v, v));
  }
  return hn::AllTrue(d, hn::Eq(sum, sum));
}

// c[r][0, kVectors * kLanes) (+)= sum over i < n of a[r * a_row + i * a_step] * b[i * b_step …].
// b and c are aligned to a vector; a is read one element at a time.
template <int kRows, int kVectors, bool kAccumulate>
HWY_INLINE void Multiply(const float* HWY_RESTRICT a, std::size_t a_row, std::size_t a_step,
                         const float* HWY_RESTRICT b, std::size_t b_step, std::size_t n,
                         float* HWY_RESTRICT c, std::size_t c_row) {
  const DF d;
  VF sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = kAccumulate ? hn::Load(d, c + r * c_row + v * kLanes) : hn::Zero(d);
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    VF right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = hn::Load(d, b + i * b_step + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const VF left = hn::Set(d, a[r * a_row + i * a_step]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][v], d, c + r * c_row + v * kLanes);
  }
}

// sum of a[i] * b[i]. n is a multiple of 8; no alignment.
HWY_INLINE float Dot(const float* a, const float* b, int n) {
  const hn::CappedTag<float, 8> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  for (int i = 0; i < n; i += lanes)
    sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// target[c * target_row + r] = source[r * source_row + c] * factor for r < 4 and c < columns, which
// is a multiple of 4. Both are 16-byte aligned, and so are their rows.
HWY_INLINE void TransposeFourRows(const float* HWY_RESTRICT source, std::size_t source_row,
                                  int columns, float factor, float* HWY_RESTRICT target,
                                  std::size_t target_row) {
#if HWY_TARGET == HWY_SCALAR
  for (int c = 0; c < columns; ++c) {
    for (int r = 0; r < 4; ++r) target[c * target_row + r] = source[r * source_row + c] * factor;
  }
#else
  const hn::Full128<float> d;
  const hn::Full128<double> dd;
  const auto scale = hn::Set(d, factor);
  for (int c = 0; c < columns; c += 4) {
    const auto r0 = hn::Mul(scale, hn::Load(d, source + c));
    const auto r1 = hn::Mul(scale, hn::Load(d, source + source_row + c));
    const auto r2 = hn::Mul(scale, hn::Load(d, source + 2 * source_row + c));
    const auto r3 = hn::Mul(scale, hn::Load(d, source + 3 * source_row + c));
    const auto low01 = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1));
    const auto low23 = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
    const auto high01 = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1));
    const auto high23 = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
    float* t = target + c * target_row;
    hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, low01, low23)), d, t);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, low01, low23)), d, t + target_row);
    hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, high01, high23)), d, t + 2 * target_row);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, high01, high23)), d, t + 3 * target_row);
  }
#endif
}

// To the second-level cache: on some machines few misses of the first level can be outstanding, and
// fetches that wait for one of their places would stop everything.
HWY_INLINE void PrefetchRow(const std::byte* row, int bytes) {
  constexpr int kLine = 64;
  constexpr int kRead = 0;
  constexpr int kSecondLevel = 2;
  for (int i = 0; i < bytes; i += kLine) __builtin_prefetch(row + i, kRead, kSecondLevel);
}

// The same for rows of a few lines, which take longer to count than to fetch.
HWY_INLINE void PrefetchShortRow(const std::byte* row, int bytes) {
  constexpr int kLine = 64;
  PrefetchRow(row, 1);
  if (bytes > kLine) PrefetchRow(row + kLine, 1);
  if (bytes > 2 * kLine) PrefetchRow(row + 2 * kLine, bytes - 2 * kLine);
}

// Floats from row to row of a tile: an odd number of cache lines, so that a column of rows does not
// fall into a few sets of the first-level cache.
inline int RowStride(int dim) {
  constexpr int kLineFloats = 16;
  return ((dim + kLineFloats - 1) / kLineFloats | 1) * kLineFloats;
}

// Hands out 64-byte aligned pieces of a workspace. With a null base it only measures.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(base) {}

  template <class T>
  T* Take(std::size_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
