// Loading chunks of key and value rows as f32, for kernels whose lanes are dims.
//
// A chunk is two vectors of elements, its halves. Types differ in which of its elements are in
// which half: kEvenOdd types have the even ones in the first, because splitting 16-bit pairs costs
// only a shift and a mask; queries are packed and outputs unpacked in the same order. Halves are
// loaded one at a time: registers are scarcer than loads. Included once per target.

#if defined(TREELINE_KERNELS_CPU_KV_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_KV_LOAD_INL_H_
#undef TREELINE_KERNELS_CPU_KV_LOAD_INL_H_
#else
#define TREELINE_KERNELS_CPU_KV_LOAD_INL_H_
#endif

#include <algorithm>

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

inline constexpr int kChunk = 2 * kLanes;

// Each loader gives Half(row, element, second): one half of the chunk that starts at `element`, all
// of it in the row; and HalfTail(…, count): the same if only the first `count` elements of the
// chunk, a multiple of 8, are in the row; the others are 0. `second` is a constant wherever speed
// matters.

struct LoadF32 {
  static constexpr bool kEvenOdd = false;

  static const float* At(const std::byte* row, int element, bool second) {
    return reinterpret_cast<const float*>(row) + element + (second ? kLanes : 0);
  }
  static HWY_INLINE VF Half(const std::byte* row, int element, bool second) {
    return hn::LoadU(DF(), At(row, element, second));
  }
  static HWY_INLINE VF HalfTail(const std::byte* row, int element, bool second, int count) {
    const DF d;
    const int left = count - (second ? kLanes : 0);
    if (left <= 0) return hn::Zero(d);
    return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(left)), d,
                          At(row, element, second));
  }
};

struct LoadBF16 {
  static constexpr bool kEvenOdd = true;
  using DU = hn::RebindToUnsigned<DF>;

  static const std::uint32_t* At(const std::byte* row, int element) {
    return reinterpret_cast<const std::uint32_t*>(row + 2 * element);  // for unaligned loads only
  }
  static HWY_INLINE VF Split(hn::Vec<DU> pairs, bool second) {
    const DF d;
    return second ? hn::BitCast(d, hn::And(pairs, hn::Set(DU(), 0xFFFF0000u)))
                  : hn::BitCast(d, hn::ShiftLeft<16>(pairs));
  }
  static HWY_INLINE VF Half(const std::byte* row, int element, bool second) {
    return Split(hn::LoadU(DU(), At(row, element)), second);
  }
  static HWY_INLINE VF HalfTail(const std::byte* row, int element, bool second, int count) {
    const DU du;
    const auto pairs = static_cast<std::size_t>(count) / 2;
    return Split(hn::MaskedLoad(hn::FirstN(du, pairs), du, At(row, element)), second);
  }
};

struct LoadF16 {
  static constexpr bool kEvenOdd = false;
  using D16 = hn::Rebind<hwy::float16_t, DF>;

  static const hwy::float16_t* At(const std::byte* row, int element, bool second) {
    return reinterpret_cast<const hwy::float16_t*>(row) + element + (second ? kLanes : 0);
  }
  static HWY_INLINE VF Half(const std::byte* row, int element, bool second) {
    return hn::PromoteTo(DF(), hn::LoadU(D16(), At(row, element, second)));
  }
  static HWY_INLINE VF HalfTail(const std::byte* row, int element, bool second, int count) {
    const DF d;
    const int left = std::min(count - (second ? kLanes : 0), kLanes);
    if (left <= 0) return hn::Zero(d);
    // Tails are rare and short: go through memory.
    HWY_ALIGN hwy::float16_t copy[kLanes] = {};
    std::memcpy(copy, At(row, element, second),
                static_cast<std::size_t>(left) * sizeof(hwy::float16_t));
    return hn::PromoteTo(d, hn::Load(D16(), copy));
  }
};

struct LoadQ8 {
  static constexpr bool kEvenOdd = false;
  static_assert(Q8Block::kElements % kChunk == 0);

  static HWY_INLINE VF Half(const std::byte* row, int element, bool second) {
    const DF d;
    const hn::RebindToSigned<DF> di;
    const hn::Rebind<std::int8_t, DF> d8;
    const hn::Rebind<std::uint16_t, DF> d16;
    const hn::Rebind<hwy::float16_t, DF> dh;
    const Q8Block& block = reinterpret_cast<const Q8Block*>(row)[element / Q8Block::kElements];
    const std::int8_t* p = block.values + element % Q8Block::kElements + (second ? kLanes : 0);
    const VF scale = hn::PromoteTo(d, hn::BitCast(dh, hn::Set(d16, block.scale)));
    return hn::Mul(scale, hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, p))));
  }
  // The last block is whole, so a chunk never leaves it; surplus elements meet zeros in the query
  // and are dropped from the output.
  static HWY_INLINE VF HalfTail(const std::byte* row, int element, bool second, int /*count*/) {
    return Half(row, element, second);
  }
};

// Where element i of a padded row is after loading with Loader.
template <class Loader>
HWY_INLINE int Packed(int i) {
  if constexpr (Loader::kEvenOdd) {
    const int in_chunk = i % kChunk;
    return i - in_chunk + in_chunk % 2 * kLanes + in_chunk / 2;
  }
  return i;
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
