#pragma once

#include <cstddef>
#include <cstdint>

// Products of bf16 matrices with f32 sums: what machines do in hardware, each in its own way. The
// kernels of this folder are written over one such product and know nothing else of the machine.

namespace treeline::cpu::bf16 {

inline constexpr int kSide = 32;       // rows and columns of a product
inline constexpr int kDepth = 32;      // elements that a step multiplies
inline constexpr int kTileRows = 16;   // of a tile: rows of 64 bytes
inline constexpr int kTileSize = 512;  // elements of a tile

// c [32, 32] = a * b, or c += a * b, over `steps` steps of 32 elements.
//
// Rows of `a` are as matrices are: 32 elements of a step lie together. `b` comes as tiles, two of
// 16 columns a step; row i of a tile holds elements 2i and 2i + 1 of each of its columns, in pairs.
struct Product {
  const std::uint16_t* a;  // row r of step s starts at a + r * a_row + s * a_step
  std::int64_t a_row;
  std::int64_t a_step;
  const std::uint16_t* b;  // tile c of step s starts at b + c * b_column + s * b_step
  std::int64_t b_column;
  std::int64_t b_step;
  int steps;
  float* c;  // rows c_row floats apart
  std::int64_t c_row;
  bool add;
};

// How a machine multiplies. Between begin() and end() a thread may call multiply().
struct Multiplier {
  void (*begin)() noexcept;
  void (*multiply)(const Product& product) noexcept;
  void (*end)() noexcept;
};

// With tiles of AMX. Null if the CPU or the system has none; see WhyNoAmx().
const Multiplier* AmxMultiplier();

// Why AmxMultiplier() is null, for people: "the CPU has no AMX", say. Null if it is not.
const char* WhyNoAmx();

// With the dot products of AVX-512 BF16. Null if the CPU has none.
const Multiplier* DotMultiplier();

// With f32 arithmetic in plain loops: for tests of the kernels on machines that have neither.
const Multiplier& PlainMultiplier();

}  // namespace treeline::cpu::bf16
