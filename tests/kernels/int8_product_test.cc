// Every way to multiply q8_0 keys with rounded queries, and q8_0 values with rounded weights, that
// this machine has: whole numbers, so all must be exact.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

std::int8_t RandomByte(std::mt19937& random) {
  return static_cast<std::int8_t>(static_cast<int>(random() % 256) - 128);
}

QueryUnit RandomQuery(std::mt19937& random) {
  QueryUnit query{};
  std::ranges::generate(query.values, [&] { return RandomByte(random); });
  return query;
}

void FindOffsets(QueryUnit& query) {
  for (int r = 0; r < kRows; ++r) {
    query.offsets[r] = 0;
    for (int i = 0; i < kUnit; ++i) query.offsets[r] -= 128 * query.values[QueryPlace(r, i)];
  }
}

void ExpectExactProducts(const Multiplier& multiplier) {
  std::mt19937 random(1);
  multiplier.begin();
  for (const int units : {1, 2, 3, 4, 18}) {
    // Rows, units and what belongs to neither lie apart, as blocks with their scales do.
    const std::int64_t unit_stride = 34;
    const std::int64_t key_stride = unit_stride * units + 62;
    std::vector<std::int8_t> keys(static_cast<std::size_t>(key_stride * kKeys));
    std::ranges::generate(keys, [&] { return RandomByte(random); });
    std::vector<QueryUnit> query(static_cast<std::size_t>(units));
    std::ranges::generate(query, [&] { return RandomQuery(random); });
    std::fill_n(keys.begin(), kUnit, std::int8_t{-128});  // the largest sum there is
    for (int i = 0; i < kUnit; ++i) query[0].values[QueryPlace(0, i)] = -128;
    std::ranges::for_each(query, FindOffsets);
    constexpr std::int32_t kUntouched = 12345;
    std::vector<std::int32_t> sums(static_cast<std::size_t>(units * kUnitSums) + 16, kUntouched);
    multiplier.multiply({.keys = reinterpret_cast<const std::byte*>(keys.data()),
                         .key_stride = key_stride,
                         .unit_stride = unit_stride,
                         .query = query.data(),
                         .units = units,
                         .sums = sums.data()});
    for (int u = 0; u < units; ++u) {
      for (int j = 0; j < kKeys; ++j) {
        for (int r = 0; r < kRows; ++r) {
          std::int32_t want = 0;
          for (int i = 0; i < kUnit; ++i) {
            want += keys[static_cast<std::size_t>(j * key_stride + u * unit_stride + i)] *
                    query[static_cast<std::size_t>(u)].values[QueryPlace(r, i)];
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

void ExpectExactSums(const Multiplier& multiplier) {
  std::mt19937 random(2);
  multiplier.begin();
  for (int round = 0; round < 50; ++round) {
    const std::ptrdiff_t offset = 2 + 34 * (round % 3);
    const std::int64_t stride = kUnit * (1 + round % 4) + round % 2;
    std::vector<std::vector<std::int8_t>> rows(kKeys);
    const std::byte* values[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      auto& row = rows[static_cast<std::size_t>(j)];
      row.resize(static_cast<std::size_t>(offset) + kUnit);  // nothing behind the unit may be read
      std::ranges::generate(row, [&] { return RandomByte(random); });
      values[j] = reinterpret_cast<const std::byte*>(row.data());
    }
    constexpr int kMost = 1 << 14;
    std::int16_t weights[kKeys * kRows];
    for (std::int16_t& weight : weights) {
      weight = static_cast<std::int16_t>(static_cast<int>(random() % (2 * kMost + 1)) - kMost);
    }
    if (round == 0) {  // the largest sum there is
      std::ranges::fill(weights, static_cast<std::int16_t>(-kMost));
      for (auto& row : rows) std::ranges::fill(row, std::int8_t{-128});
    }
    const float scales[kRows] = {1.0f, 0.3f, 0x1p-20f, 0.0f};
    constexpr float kBefore = 0.7f;
    std::vector<float> out(static_cast<std::size_t>(stride * kRows), kBefore);
    multiplier.weigh({.values = values,
                      .offset = offset,
                      .weights = weights,
                      .scales = scales,
                      .out = out.data(),
                      .out_stride = stride});
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < stride; ++i) {
        std::int32_t sum = 0;
        for (int j = 0; j < kKeys && i < kUnit; ++j) {
          // Pairs are of a key of the first half and one of the second.
          const int place = (j % kPairs * kRows + r) * 2 + j / kPairs;
          sum += weights[place] *
                 rows[static_cast<std::size_t>(j)][static_cast<std::size_t>(offset + i)];
        }
        ASSERT_EQ(out[static_cast<std::size_t>(r * stride + i)],
                  std::fma(static_cast<float>(sum), scales[r], kBefore))
            << "round " << round << ", row " << r << ", element " << i;
      }
    }
  }
  multiplier.end();
}

void ExpectExact(const Multiplier& multiplier) {
  ExpectExactProducts(multiplier);
  ExpectExactSums(multiplier);
}

TEST(Int8Product, InPlainLoops) { ExpectExact(PlainMultiplier()); }

TEST(Int8Product, ByVnni) {
  if (VnniMultiplier() == nullptr) GTEST_SKIP() << "the CPU has no AVX-512 with VNNI";
  ExpectExact(*VnniMultiplier());
}

TEST(Int8Product, ByTiles) {
  if (AmxMultiplier() == nullptr) {
    const char* why = bf16::WhyNoAmx();
    GTEST_SKIP() << (why != nullptr ? why : "the CPU lacks AMX for bytes, or VNNI");
  }
  ExpectExact(*AmxMultiplier());
}

}  // namespace
}  // namespace treeline::cpu::int8
