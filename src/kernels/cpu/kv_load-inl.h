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
#include <cstddef>

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

inline constexpr int kChunk = 2 * kLanes;

// Each loader gives Offset(element): where in a row, in bytes, a chunk is; Half(chunk, second): one
// half of a chunk, all of it in the row; and HalfTail(…, count): the same if only the first `count`
// elements of the chunk, a multiple of 8, are in the row; the others are 0. `second` is a constant
// wherever speed matters. What a kScaled loader gives is still to be multiplied with the scale of
// the unit that the chunk is in.

struct LoadF32 {
  static constexpr bool kEvenOdd = false;
  static constexpr bool kScaled = false;

  static std::ptrdiff_t Offset(int element) { return std::ptrdiff_t{4} * element; }
  static const float* At(const std::byte* chunk, bool second) {
    return reinterpret_cast<const float*>(chunk) + (second ? kLanes : 0);
  }
  static HWY_INLINE VF Half(const std::byte* chunk, bool second) {
    return hn::LoadU(DF(), At(chunk, second));
  }
  static HWY_INLINE VF HalfTail(const std::byte* chunk, bool second, int count) {
    const DF d;
    const int left = count - (second ? kLanes : 0);
    if (left <= 0) return hn::Zero(d);
    return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(left)), d, At(chunk, second));
  }
};

struct LoadBF16 {
  static constexpr bool kEvenOdd = true;
  static constexpr bool kScaled = false;
  using DU = hn::RebindToUnsigned<DF>;

  static std::ptrdiff_t Offset(int element) { return std::ptrdiff_t{2} * element; }
  static const std::uint32_t* At(const std::byte* chunk) {
    return reinterpret_cast<const std::uint32_t*>(chunk);  // for unaligned loads only
  }
  static HWY_INLINE VF Split(hn::Vec<DU> pairs, bool second) {
    const DF d;
    return second ? hn::BitCast(d, hn::And(pairs, hn::Set(DU(), 0xFFFF0000u)))
                  : hn::BitCast(d, hn::ShiftLeft<16>(pairs));
  }
  static HWY_INLINE VF Half(const std::byte* chunk, bool second) {
    return Split(hn::LoadU(DU(), At(chunk)), second);
  }
  static HWY_INLINE VF HalfTail(const std::byte* chunk, bool second, int count) {
    const DU du;
    const auto pairs = static_cast<std::size_t>(count) / 2;
    return Split(hn::MaskedLoad(hn::FirstN(du, pairs), du, At(chunk)), second);
  }
};

struct LoadF16 {
  static constexpr bool kEvenOdd = false;
  static constexpr bool kScaled = false;

  static std::ptrdiff_t Offset(int element) { return std::ptrdiff_t{2} * element; }
  static const std::uint16_t* At(const std::byte* chunk, bool second) {
    return reinterpret_cast<const std::uint16_t*>(chunk) + (second ? kLanes : 0);
  }
  static HWY_INLINE VF Half(const std::byte* chunk, bool second) {
    return LoadHalves(DF(), At(chunk, second));
  }
  static HWY_INLINE VF HalfTail(const std::byte* chunk, bool second, int count) {
    const DF d;
    const int left = std::min(count - (second ? kLanes : 0), kLanes);
    if (left <= 0) return hn::Zero(d);
    // Tails are rare and short: go through memory.
    HWY_ALIGN std::uint16_t copy[kLanes] = {};
    std::memcpy(copy, At(chunk, second), static_cast<std::size_t>(left) * sizeof(std::uint16_t));
    return LoadHalves(d, copy);
  }
};

struct LoadQ8 {
  static constexpr bool kEvenOdd = false;
  static constexpr bool kScaled = true;
  static constexpr int kUnit = Q8Block::kElements;  // elements that have a scale
  static_assert(kUnit % kChunk == 0);

  static std::uint16_t ScaleBits(const std::byte* row, int unit) {
    return reinterpret_cast<const Q8Block*>(row)[unit].scale;
  }
  static std::ptrdiff_t Offset(int element) {
    return std::ptrdiff_t{element / kUnit} * static_cast<std::ptrdiff_t>(sizeof(Q8Block)) +
           static_cast<std::ptrdiff_t>(offsetof(Q8Block, values)) + element % kUnit;
  }
  static HWY_INLINE VF Half(const std::byte* chunk, bool second) {
    const hn::RebindToSigned<DF> di;
    const hn::Rebind<std::int8_t, DF> d8;
    const auto* values = reinterpret_cast<const std::int8_t*>(chunk) + (second ? kLanes : 0);
    return hn::ConvertTo(DF(), hn::PromoteTo(di, hn::LoadU(d8, values)));
  }
  // The last block is whole, so a chunk never leaves it; surplus elements meet zeros in the query
  // and are dropped from the output.
  static HWY_INLINE VF HalfTail(const std::byte* chunk, bool second, int /*count*/) {
    return Half(chunk, second);
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
