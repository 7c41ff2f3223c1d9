#pragma once

// How AMX's tiles are set up: eight of them, of up to 16 rows of 64 bytes. Only for files that are
// about AMX; whether there is any is bf16::WhyNoAmx().

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <cstdint>

namespace treeline::cpu {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void Set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<std::uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// Of this thread, until _tile_release().
__attribute__((target("amx-tile"))) inline void Load(const TileConfig& config) {
  // gcc 12 believes that 8 of the 64 bytes are read, and may leave out what writes the others.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  asm volatile("" ::: "memory");
}

}  // namespace treeline::cpu

#endif
