#include "treeline/dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"

namespace treeline {

std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kQ8_0:
      return "q8_0";
  }
  Throw<ArgumentError>("dtype ", static_cast<int>(dtype), " is not one of f32, bf16, f16, q8_0");
}

DType ParseDType(std::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (name == Name(dtype)) return dtype;
  }
  Throw<ArgumentError>("dtype '", name, "' is not one of f32, bf16, f16, q8_0");
}

std::size_t RowBytes(DType dtype, int dim) {
  const auto n = static_cast<std::size_t>(dim);
  switch (dtype) {
    case DType::kF32:
      return 4 * n;
    case DType::kBF16:
    case DType::kF16:
      return 2 * n;
    case DType::kQ8_0:
      return (n + Q8Block::kElements - 1) / Q8Block::kElements * sizeof(Q8Block);
  }
  Throw<ArgumentError>("dtype ", static_cast<int>(dtype), " has no row size");
}

std::size_t Alignment(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

float F32FromBF16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t BF16FromF32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float F32FromF16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1F;
  const std::uint32_t mantissa = bits & 0x3FF;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000 | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::uint16_t F16FromF32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00);
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7C00);
  if (magnitude < 0x1p-14f) {
    // Subnormals are multiples of 2^-24; nearbyint rounds ties to even.
    return static_cast<std::uint16_t>(
        sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(magnitude, 24))));
  }
  const std::uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + ((bits >> 13) & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

namespace {

void EncodeQ8(std::span<const float> source, void* row) {
  auto* bytes = static_cast<std::byte*>(row);
  for (std::size_t begin = 0; begin < source.size(); begin += Q8Block::kElements) {
    const auto block =
        source.subspan(begin, std::min<std::size_t>(Q8Block::kElements, source.size() - begin));
    float largest = 0.0f;
    float not_finite = 0.0f;  // NaN if any element is not finite, and then so is the scale
    for (float x : block) {
      largest = std::max(largest, std::fabs(x));
      not_finite += x - x;
    }
    Q8Block encoded{};
    encoded.scale = F16FromF32(largest / 127.0f + not_finite);
    const float scale = F32FromF16(encoded.scale);
    for (std::size_t i = 0; i < block.size(); ++i) {
      const float q = scale > 0.0f ? block[i] / scale : 0.0f;
      encoded.values[i] = static_cast<std::int8_t>(std::clamp(std::nearbyint(q), -127.0f, 127.0f));
    }
    std::memcpy(bytes, &encoded, sizeof(encoded));
    bytes += sizeof(encoded);
  }
}

void DecodeQ8(const void* row, std::span<float> target) {
  const auto* bytes = static_cast<const std::byte*>(row);
  for (std::size_t i = 0; i < target.size(); ++i) {
    Q8Block block;
    std::memcpy(&block, bytes + i / Q8Block::kElements * sizeof(block), sizeof(block));
    target[i] = F32FromF16(block.scale) * static_cast<float>(block.values[i % Q8Block::kElements]);
  }
}

}  // namespace

void EncodeRow(DType dtype, std::span<const float> source, void* row) {
  auto* halves = static_cast<std::uint16_t*>(row);
  switch (dtype) {
    case DType::kF32:
      std::memcpy(row, source.data(), source.size_bytes());
      return;
    case DType::kBF16:
      std::transform(source.begin(), source.end(), halves, BF16FromF32);
      return;
    case DType::kF16:
      std::transform(source.begin(), source.end(), halves, F16FromF32);
      return;
    case DType::kQ8_0:
      EncodeQ8(source, row);
      return;
  }
}

void DecodeRow(DType dtype, const void* row, std::span<float> target) {
  const auto* halves = static_cast<const std::uint16_t*>(row);
  switch (dtype) {
    case DType::kF32:
      std::memcpy(target.data(), row, target.size_bytes());
      return;
    case DType::kBF16:
      std::transform(halves, halves + target.size(), target.begin(), F32FromBF16);
      return;
    case DType::kF16:
      std::transform(halves, halves + target.size(), target.begin(), F32FromF16);
      return;
    case DType::kQ8_0:
      DecodeQ8(row, target);
      return;
  }
}

}  // namespace treeline
