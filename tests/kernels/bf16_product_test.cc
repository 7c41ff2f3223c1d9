// Every way to multiply in bf16 that this machine has, against float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/cpu/bf16/product.h"
#include "random_values.h"
#include "treeline/dtype.h"
#include "treeline/isa.h"

namespace treeline::cpu::bf16 {
namespace {

using test::RandomValues;

std::vector<std::uint16_t> RandomBits(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> bits;
  for (const float x : RandomValues(count, seed)) {
    bits.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16));
  }
  return bits;
}

// c [32, 32] by the definition of a product.
std::vector<double> Expected(const Product& p, const std::vector<float>& before) {
  std::vector<double> c(before.begin(), before.end());
  for (int r = 0; r < kSide; ++r) {
    for (int column = 0; column < kSide; ++column) {
      double sum = p.add ? before[static_cast<std::size_t>(r * p.c_row + column)] : 0.0;
      for (int k = 0; k < p.steps * kDepth; ++k) {
        const std::uint16_t a = p.a[r * p.a_row + k / kDepth * p.a_step + k % kDepth];
        const std::uint16_t* tile = p.b + column / kTileRows * p.b_column + k / kDepth * p.b_step;
        const std::uint16_t b = tile[k % kDepth / 2 * kSide + column % kTileRows * 2 + k % 2];
        sum += static_cast<double>(F32FromBF16(a)) * F32FromBF16(b);
      }
      c[static_cast<std::size_t>(r * p.c_row + column)] = sum;
    }
  }
  return c;
}

void ExpectRight(const Multiplier& multiplier) {
  constexpr std::int64_t kCRow = 48;
  multiplier.begin();
  for (int steps : {1, 2, 7}) {
    for (bool add : {false, true}) {
      // Rows, steps and columns that lie apart, with others in between.
      const std::int64_t a_row = (steps + 1) * kDepth;
      const std::int64_t b_step = 3 * kTileSize;
      const std::vector<std::uint16_t> a = RandomBits(kSide * static_cast<std::size_t>(a_row), 1);
      const std::vector<std::uint16_t> b = RandomBits(static_cast<std::size_t>(steps * b_step), 2);
      const std::vector<float> before = RandomValues(kSide * kCRow, 3);
      std::vector<float> c = before;
      const Product product{.a = a.data(),
                            .a_row = a_row,
                            .a_step = kDepth,
                            .b = b.data(),
                            .b_column = 2 * kTileSize,
                            .b_step = b_step,
                            .steps = steps,
                            .c = c.data(),
                            .c_row = kCRow,
                            .add = add};
      const std::vector<double> want = Expected(product, before);
      multiplier.multiply(product);
      for (std::size_t i = 0; i < c.size(); ++i) {
        ASSERT_NEAR(c[i], want[i], 1e-4) << steps << " steps, element " << i;
      }
    }
  }
  multiplier.end();
}

TEST(Bf16Product, InPlainLoops) { ExpectRight(PlainMultiplier()); }

TEST(Bf16Product, ByDotProducts) {
  if (DotMultiplier() == nullptr) GTEST_SKIP() << "the CPU has no AVX-512 BF16";
  ExpectRight(*DotMultiplier());
}

TEST(Bf16Product, ByTiles) {
  if (AmxMultiplier() == nullptr) GTEST_SKIP() << WhyNoAmx();
  ExpectRight(*AmxMultiplier());
}

// What multiplies is what is listed: on machines with AVX-512, which all that have tiles are.
TEST(Bf16Product, IsAttainableWhereItMultiplies) {
  const std::vector<Isa>& isas = AttainableIsas();
  const auto has = [&](Isa isa) { return std::find(isas.begin(), isas.end(), isa) != isas.end(); };
  EXPECT_EQ(has(Isa::kAmx), AmxMultiplier() != nullptr && has(Isa::kAvx512));
  EXPECT_EQ(has(Isa::kAvx512Bf16), DotMultiplier() != nullptr && has(Isa::kAvx512));
  EXPECT_FALSE(has(Isa::kPlainBf16));
}

}  // namespace
}  // namespace treeline::cpu::bf16
