// Every way to multiply q8_0 keys with rounded queries that this machine has: whole numbers, so all
// must be exact.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cpu/bf16/product.h"
#include "kernels/cpu/int8/product.h"

namespace treeline::cpu::int8 {
namespace {

// Element i of row r of a unit of a query.
std::size_t QueryPlace(int r, int i) {
  return static_cast<std::size_t>((i / kTogether * kRows + r) * kTogether + i % kTogether);
}

void ExpectExact(const Multiplier& multiplier) {
  std::mt19937 random(1);
  multiplier.begin();
  for (const int units : {1, 2, 3, 4, 18}) {
    // Rows, units and what belongs to neither lie apart, as blocks with their scales do.
    const std::int64_t unit_stride = 34;
    const std::int64_t key_stride = unit_stride * units + 62;
    const std::int64_t query_stride = kQueryUnit + 64;
    const auto byte = [&] {
      return static_cast<std::int8_t>(static_cast<int>(random() % 256) - 128);
    };
    std::vector<std::int8_t> keys(static_cast<std::size_t>(key_stride * kKeys));
    std::vector<std::int8_t> query(static_cast<std::size_t>(query_stride * units));
    std::ranges::generate(keys, byte);
    std::ranges::generate(query, byte);
    std::fill_n(keys.begin(), kUnit, std::int8_t{-128});  // the largest sum there is
    for (int i = 0; i < kUnit; ++i) query[QueryPlace(0, i)] = -128;
    constexpr std::int32_t kUntouched = 12345;
    std::vector<std::int32_t> sums(static_cast<std::size_t>(units * kUnitSums) + 16, kUntouched);
    multiplier.multiply({.keys = reinterpret_cast<const std::byte*>(keys.data()),
                         .key_stride = key_stride,
                         .unit_stride = unit_stride,
                         .query = query.data(),
                         .query_stride = query_stride,
                         .units = units,
                         .sums = sums.data()});
    for (int u = 0; u < units; ++u) {
      for (int j = 0; j < kKeys; ++j) {
        for (int r = 0; r < kRows; ++r) {
          std::int32_t want = 0;
          for (int i = 0; i < kUnit; ++i) {
            want += keys[static_cast<std::size_t>(j * key_stride + u * unit_stride + i)] *
                    query[static_cast<std::size_t>(u * query_stride) + QueryPlace(r, i)];
          }
          ASSERT_EQ(sums[static_cast<std::size_t>((u * kKeys + j) * kRows + r)], want)
              << units << " units: " << u << ", key " << j << ", row " << r;
        }
      }
    }
    EXPECT_TRUE(std::all_of(sums.end() - 16, sums.end(), [](auto x) { return x == kUntouched; }));
  }
  multiplier.end();
}

TEST(Int8Product, InPlainLoops) { ExpectExact(PlainMultiplier()); }

TEST(Int8Product, ByTiles) {
  if (AmxMultiplier() == nullptr) {
    const char* why = bf16::WhyNoAmx();
    GTEST_SKIP() << (why != nullptr ? why : "the CPU's AMX does not multiply bytes");
  }
  ExpectExact(*AmxMultiplier());
}

}  // namespace
}  // namespace treeline::cpu::int8
