#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace treeline {

// Storage type of a tensor's elements. Arithmetic is f32 for all of them.
enum class DType : std::uint8_t {
  kF32,
  kBF16,
  kF16,
  kQ8_0,  // blocks of 32 int8 with one f16 scale, as in GGUF; K and V only
};

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kQ8_0};

// One q8_0 block: element i is scale * values[i].
struct Q8Block {
  static constexpr int kElements = 32;
  std::uint16_t scale;  // f16 bits
  std::int8_t values[kElements];
};
static_assert(sizeof(Q8Block) == 34);

// "f32", "bf16", "f16", "q8_0".
std::string_view Name(DType dtype);

// Inverse of Name. Throws ArgumentError that lists the names.
DType ParseDType(std::string_view name);

// Bytes of a row of `dim` elements. The last q8_0 block of a row is whole even where `dim` is not a
// multiple of 32; its surplus elements do not count.
std::size_t RowBytes(DType dtype, int dim);

// Alignment that a row of this type needs.
std::size_t Alignment(DType dtype);

float F32FromBF16(std::uint16_t bits);
float F32FromF16(std::uint16_t bits);
// Round to nearest, ties to even. A NaN stays a NaN.
std::uint16_t BF16FromF32(float value);
std::uint16_t F16FromF32(float value);

// Writes RowBytes(dtype, source.size()) bytes to `row`, rounding to the nearest value of the type.
// A q8_0 block with an element that is not finite is all NaN.
void EncodeRow(DType dtype, std::span<const float> source, void* row);
// Reads a row of target.size() elements.
void DecodeRow(DType dtype, const void* row, std::span<float> target);

}  // namespace treeline
