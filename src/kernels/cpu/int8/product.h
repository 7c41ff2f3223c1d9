#pragma once

#include <cstddef>
#include <cstdint>

// Products of q8_0 keys, as they lie, with queries that are rounded to 8 bits, and sums of q8_0
// values with weights that are rounded to 14 bits: what machines do in hardware that is made for
// it.

namespace treeline::cpu::int8 {

inline constexpr int kKeys = 16;
inline constexpr int kRows = 4;      // of queries
inline constexpr int kUnit = 32;     // elements that have a scale
inline constexpr int kTogether = 4;  // elements that machines multiply at once
inline constexpr int kPairs = kKeys / 2;
inline constexpr int kUnitSums = kKeys * kRows;

// A unit of the rows of a query.
struct alignas(64) QueryUnit {
  std::int8_t values[kUnit * kRows];  // [kUnit / kTogether, kRows, kTogether]
  std::int32_t offsets[kRows];        // the sum of a row's values, times -128
  float scales[kRows];                // of a row's values; sums are without it
};

// Sums over each unit of `keys` times `query`.
struct Product {
  const std::byte* keys;  // unit u of key j starts at keys + j * key_stride + u * unit_stride
  std::int64_t key_stride;
  std::int64_t unit_stride;
  const QueryUnit* query;  // [unit]
  int units;
  std::int32_t* sums;  // [unit, kKeys, kRows]
};

// out += scale * (sum over keys of weight * value), over one unit.
struct WeightedSum {
  const std::byte* const* values;  // [kKeys]; the unit starts `offset` behind
  std::ptrdiff_t offset;
  const std::int16_t* weights;  // [kPairs, kRows, 2]: of keys j and j + kPairs, up to 2^14 in size
  const float* scales;          // [kRows]
  float* out;                   // [kRows, kUnit]
  std::int64_t out_stride;      // from row to row
};

// How a machine multiplies. Between begin() and end() a thread may call the others.
struct Multiplier {
  void (*begin)() noexcept;
  void (*multiply)(const Product& product) noexcept;
  void (*weigh)(const WeightedSum& sum) noexcept;
  void (*end)() noexcept;
};

// With VNNI of AVX-512. Null if the CPU has none.
const Multiplier* VnniMultiplier();

// Keys with tiles of AMX, values with VNNI. Null if the CPU or the system lacks either.
const Multiplier* AmxMultiplier();

// In plain loops: for tests of what is around it on machines that have none.
const Multiplier& PlainMultiplier();

}  // namespace treeline::cpu::int8
