// Products of a few tokens with rows of packed weights, which are read once.
//
// Activations are rounded to 16 bits, 32 at a time, so that products of whole numbers do the work
// of widening every weight; their rounding is 2^-16 of the largest of a block, below that of bf16
// keys.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm/dot_rows.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/gemm/row_formats.h"
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/kv_load-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

// Half a block at most, which is how formats of 4 bits divide their bytes.
using D16 = hn::CappedTag<std::int16_t, kFineBlock / 2>;
#if HWY_TARGET == HWY_SCALAR
using D32 = hn::Rebind<std::int32_t, D16>;
#else
using D32 = hn::RepartitionToWide<D16>;
#endif
using DS = hn::RebindToFloat<D32>;  // of sums
using V16 = hn::Vec<D16>;
using V32 = hn::Vec<D32>;
using VS = hn::Vec<DS>;
constexpr int kStep = hn::MaxLanes(D16());

HWY_INLINE V16 LoadUnsigned(const std::uint8_t* bytes) {
  const hn::Rebind<std::uint8_t, D16> d;
  return hn::PromoteTo(D16(), hn::LoadU(d, bytes));
}

HWY_INLINE V16 LoadSigned(const std::int8_t* bytes) {
  const hn::Rebind<std::int8_t, D16> d;
  return hn::PromoteTo(D16(), hn::LoadU(d, bytes));
}

// A 16-bit float in all lanes.
HWY_INLINE VS WidenHalf(std::uint16_t half) {
  const hn::Rebind<std::uint16_t, DS> d16;
  const hn::Rebind<hwy::float16_t, DS> dh;
  return hn::PromoteTo(DS(), hn::BitCast(dh, hn::Set(d16, half)));
}

// sum + products of weights and activations, pairs of which are added.
HWY_INLINE V32 AddProducts(V16 weights, const std::int16_t* x, V32 sum) {
  V32 other = hn::Zero(D32());
  sum = hn::ReorderWidenMulAccumulate(D32(), weights, hn::LoadU(D16(), x), sum, other);
  return hn::RearrangeToOddPlusEven(sum, other);
}

// What a row has come to: products in units of both scales, and constants that weights have
// besides.
struct Sums {
  VS products;
  VS constants;  // the same in all lanes

  HWY_INLINE void Clear() { products = constants = hn::Zero(DS()); }
  HWY_INLINE void Add(V32 whole, VS scale) {
    products = hn::MulAdd(hn::ConvertTo(DS(), whole), scale, products);
  }
  HWY_INLINE float Total() const {
    return hn::GetLane(hn::SumOfLanes(DS(), products)) + hn::GetLane(constants);
  }
};

// The formats. Each adds a block of weights to the sums.

// 4 bits of the first and the second half of a block share a byte.
HWY_INLINE V32 DotNibbles(const std::uint8_t* bytes, const std::int16_t* x) {
  V32 sum = hn::Zero(D32());
  for (int i = 0; i < kFineBlock / 2; i += kStep) {
    const V16 both = LoadUnsigned(bytes + i);
    sum = AddProducts(hn::And(both, hn::Set(D16(), 15)), x + i, sum);
    sum = AddProducts(hn::ShiftRight<4>(both), x + kFineBlock / 2 + i, sum);
  }
  return sum;
}

struct Q40 {
  using Block = Q40Block;
  static HWY_INLINE void Add(const Block& block, const FineRow& x, int at, Sums& sums) {
    const VS d = WidenHalf(block.d);
    const int unit = at / kFineBlock;
    sums.Add(DotNibbles(block.q, x.values + at), hn::Mul(d, hn::Set(DS(), x.scales[unit])));
    sums.constants = hn::NegMulAdd(d, hn::Set(DS(), 8.0f * x.sums[unit]), sums.constants);
  }
};

struct Q41 {
  using Block = Q41Block;
  static HWY_INLINE void Add(const Block& block, const FineRow& x, int at, Sums& sums) {
    const int unit = at / kFineBlock;
    sums.Add(DotNibbles(block.q, x.values + at),
             hn::Mul(WidenHalf(block.d), hn::Set(DS(), x.scales[unit])));
    sums.constants = hn::MulAdd(WidenHalf(block.m), hn::Set(DS(), x.sums[unit]), sums.constants);
  }
};

struct Q80 {
  using Block = Q80Block;
  static HWY_INLINE void Add(const Block& block, const FineRow& x, int at, Sums& sums) {
    V32 sum = hn::Zero(D32());
    for (int i = 0; i < kFineBlock; i += kStep) {
      sum = AddProducts(LoadSigned(block.q + i), x.values + at + i, sum);
    }
    sums.Add(sum, hn::Mul(WidenHalf(block.d), hn::Set(DS(), x.scales[at / kFineBlock])));
  }
};

struct Q4K {
  using Block = Q4KBlock;
  static HWY_INLINE void Add(const Block& block, const FineRow& x, int at, Sums& sums) {
    const Q4KScales unpacked = Unpack(block.scales);
    std::uint8_t scales[Block::kUnits];
    std::uint8_t minima[Block::kUnits];
    std::memcpy(scales, &unpacked.scales, sizeof(scales));
    std::memcpy(minima, &unpacked.minima, sizeof(minima));
    const VS d = WidenHalf(block.d);
    float constants = 0.0f;
    for (int pair = 0; pair < Block::kUnits / 2; ++pair) {
      const std::uint8_t* bytes = block.q + pair * 32;
      const std::int16_t* values = x.values + at + pair * 64;
      const int unit = at / kFineBlock + pair * 2;
      V32 low = hn::Zero(D32());
      V32 high = hn::Zero(D32());
      for (int i = 0; i < kFineBlock; i += kStep) {
        const V16 both = LoadUnsigned(bytes + i);
        low = AddProducts(hn::And(both, hn::Set(D16(), 15)), values + i, low);
        high = AddProducts(hn::ShiftRight<4>(both), values + kFineBlock + i, high);
      }
      const auto scale = [&](int i) HWY_ATTR {
        return hn::Mul(
            d, hn::Set(DS(), static_cast<float>(scales[pair * 2 + i]) * x.scales[unit + i]));
      };
      sums.Add(low, scale(0));
      sums.Add(high, scale(1));
      constants += static_cast<float>(minima[pair * 2]) * x.sums[unit] +
                   static_cast<float>(minima[pair * 2 + 1]) * x.sums[unit + 1];
    }
    sums.constants = hn::NegMulAdd(WidenHalf(block.m), hn::Set(DS(), constants), sums.constants);
  }
};

struct Q6K {
  using Block = Q6KBlock;
  static HWY_INLINE void Add(const Block& block, const FineRow& x, int at, Sums& sums) {
    const VS d = WidenHalf(block.d);
    const V16 nibble = hn::Set(D16(), 15);
    const V16 upper = hn::Set(D16(), 0x30);
    const V16 middle = hn::Set(D16(), 32);
    for (int half = 0; half < 2; ++half) {
      // Units l, l + 32, l + 64 and l + 96 of 128 share the bytes l of `high`.
      for (int part = 0; part < 2; ++part) {
        V32 whole[4];
        for (V32& sum : whole) sum = hn::Zero(D32());
        for (int i = part * 16; i < part * 16 + 16; i += kStep) {
          const V16 first = LoadUnsigned(block.low + half * 64 + i);
          const V16 second = LoadUnsigned(block.low + half * 64 + 32 + i);
          const V16 high = LoadUnsigned(block.high + half * 32 + i);
          const std::int16_t* values = x.values + at + half * 128 + i;
          const auto add = [&](int unit, V16 lower, V16 bits) HWY_ATTR {
            const V16 weight = hn::Sub(hn::Or(lower, hn::And(bits, upper)), middle);
            whole[unit] = AddProducts(weight, values + unit * 32, whole[unit]);
          };
          add(0, hn::And(first, nibble), hn::ShiftLeft<4>(high));
          add(1, hn::And(second, nibble), hn::ShiftLeft<2>(high));
          add(2, hn::ShiftRight<4>(first), high);
          add(3, hn::ShiftRight<4>(second), hn::ShiftRight<2>(high));
        }
        for (int unit = 0; unit < 4; ++unit) {
          const float scale = static_cast<float>(block.scales[half * 8 + part + unit * 2]) *
                              x.scales[at / kFineBlock + half * 4 + unit];
          sums.Add(whole[unit], hn::Mul(d, hn::Set(DS(), scale)));
        }
      }
    }
  }
};

template <class Format>
HWY_INLINE float DotPacked(const std::byte* row, const FineRow& x, int columns) {
  using Block = typename Format::Block;
  static_assert(alignof(Block) <= 2);
  const auto* blocks = reinterpret_cast<const Block*>(row);
  Sums even;
  Sums odd;  // two chains of additions at a time
  even.Clear();
  odd.Clear();
  const int count = columns / Block::kElements;
  int b = 0;
  for (; b + 2 <= count; b += 2) {
    Format::Add(blocks[b], x, b * Block::kElements, even);
    Format::Add(blocks[b + 1], x, (b + 1) * Block::kElements, odd);
  }
  if (b < count) Format::Add(blocks[b], x, b * Block::kElements, even);
  return even.Total() + odd.Total();
}

template <class Format>
void MultiplyPacked(const DotRowsArgs& args) {
  for (int row = 0; row < args.rows; ++row) {
    const std::byte* weights = args.weights + static_cast<std::size_t>(row) * args.row_bytes;
    for (int t = 0; t < args.tokens; ++t) {
      args.out[t * args.out_stride + row] = DotPacked<Format>(weights, args.x[t], args.columns);
    }
  }
}

}  // namespace

void RefineRow(const float* HWY_RESTRICT x, int columns, const FineRow& target) noexcept {
  const DF d;
  for (int begin = 0; begin < columns; begin += kFineBlock) {
    VF largest = hn::Zero(d);
    VF sums = hn::Zero(d);
    for (int i = begin; i < begin + kFineBlock; i += kLanes) {
      const VF v = hn::LoadU(d, x + i);
      largest = hn::Max(largest, hn::Abs(v));
      sums = hn::Add(sums, v);
    }
    const float sum = hn::GetLane(hn::SumOfLanes(d, sums));
    const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
    const int block = begin / kFineBlock;
    // What is not finite makes all of the product NaN.
    const bool finite = std::isfinite(sum) && std::isfinite(most);
    const float inverse = finite && most > 0.0f ? 32767.0f / most : 0.0f;
    target.scales[block] = finite ? most / 32767.0f : std::numeric_limits<float>::quiet_NaN();
    target.sums[block] = sum;
    const hn::Rebind<std::int16_t, DF> d16;
    for (int i = begin; i < begin + kFineBlock; i += kLanes) {
      const VF v = finite ? hn::Mul(hn::LoadU(d, x + i), hn::Set(d, inverse)) : hn::Zero(d);
      hn::StoreU(hn::DemoteTo(d16, hn::NearestInt(v)), d16, target.values + i);
    }
  }
}

void DotRows(const DotRowsArgs& args) noexcept {
  switch (args.format) {
    case RowFormat::kQ4_0:
      return MultiplyPacked<Q40>(args);
    case RowFormat::kQ4_1:
      return MultiplyPacked<Q41>(args);
    case RowFormat::kQ8_0:
      return MultiplyPacked<Q80>(args);
    case RowFormat::kQ4_K:
      return MultiplyPacked<Q4K>(args);
    case RowFormat::kQ6_K:
      return MultiplyPacked<Q6K>(args);
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
