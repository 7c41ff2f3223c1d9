#pragma once

#include <cstddef>
#include <cstdint>

// Products of q8_0 keys, as they lie, with queries that are rounded to 8 bits: what machines do in
// hardware that is made for it.

namespace treeline::cpu::int8 {

inline constexpr int kKeys = 16;
inline constexpr int kRows = 4;      // of queries
inline constexpr int kUnit = 32;     // elements that have a scale
inline constexpr int kTogether = 4;  // elements that machines multiply at once
inline constexpr int kUnitSums = kKeys * kRows;
inline constexpr int kQueryUnit = kUnit * kRows;  // elements

// Sums over each unit of `keys` times `query`.
struct Product {
  const std::byte* keys;  // unit u of key j starts at keys + j * key_stride + u * unit_stride
  std::int64_t key_stride;
  std::int64_t unit_stride;
  const std::int8_t* query;   // [unit, kUnit / kTogether, kRows, kTogether]
  std::int64_t query_stride;  // from unit to unit
  int units;
  std::int32_t* sums;  // [unit, kKeys, kRows]
};

// How a machine multiplies. Between begin() and end() a thread may call multiply().
struct Multiplier {
  void (*begin)() noexcept;
  void (*multiply)(const Product& product) noexcept;
  void (*end)() noexcept;
};

// With tiles of AMX. Null if the CPU or the system has none.
const Multiplier* AmxMultiplier();

// In plain loops: for tests of what is around it on machines that have none.
const Multiplier& PlainMultiplier();

}  // namespace treeline::cpu::int8
