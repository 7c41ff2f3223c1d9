#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

// Blocks of packed weights, as GGUF has them. `d` and `m` are 16-bit floats.

namespace treeline::cpu {

struct Q40Block {  // weight = d * (q - 8)
  static constexpr int kElements = 32;
  std::uint16_t d;
  std::uint8_t q[16];  // 4 bits of element i in the lower half of byte i, of i + 16 in the upper
};

struct Q41Block {  // weight = d * q + m
  static constexpr int kElements = 32;
  std::uint16_t d;
  std::uint16_t m;
  std::uint8_t q[16];  // as above
};

struct Q80Block {  // weight = d * q
  static constexpr int kElements = 32;
  std::uint16_t d;
  std::int8_t q[32];
};

struct Q4KBlock {  // weight = d * scale * q - m * minimum, one of each for 32 weights
  static constexpr int kElements = 256;
  static constexpr int kUnits = kElements / 32;
  std::uint16_t d;
  std::uint16_t m;
  std::uint8_t scales[12];  // 6 bits each: see Unpack()
  std::uint8_t q[128];      // 32 bytes hold two units, one in the lower 4 bits
};

struct Q6KBlock {  // weight = d * scale * (q - 32), a scale for 16 weights
  static constexpr int kElements = 256;
  std::uint8_t low[128];  // 4 bits; units l, l + 32, l + 64 and l + 96 of 128 share ...
  std::uint8_t high[64];  // ... the 2-bit parts of byte l here
  std::int8_t scales[16];
  std::uint16_t d;
};

// What the bits of a block's `scales` mean, a byte a unit, the first in the lowest.
struct Q4KScales {
  std::uint64_t scales;
  std::uint64_t minima;
};
// The upper 2 bits of the last four of each are those that the first four leave free.
inline Q4KScales Unpack(const std::uint8_t (&packed)[12]) {
  static_assert(std::endian::native == std::endian::little);
  constexpr std::uint32_t kSix = 0x3F3F3F3F;
  constexpr std::uint32_t kUpper = 0x30303030;
  constexpr std::uint32_t kLower = 0x0F0F0F0F;
  std::uint32_t part[3];
  std::memcpy(part, packed, sizeof(part));
  const std::uint32_t scales = (part[2] & kLower) | (part[0] >> 2 & kUpper);
  const std::uint32_t minima = (part[2] >> 4 & kLower) | (part[1] >> 2 & kUpper);
  return {(std::uint64_t{scales} << 32) | (part[0] & kSix),
          (std::uint64_t{minima} << 32) | (part[1] & kSix)};
}

}  // namespace treeline::cpu
