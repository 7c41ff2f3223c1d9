#include "backend/cpu/multiply.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "backend/cpu/rowwise.h"
#include "isa_name.h"
#include "kernels/cpu/kernel_table.h"
#include "random_values.h"
#include "treeline/dtype.h"
#include "treeline/isa.h"
#include "treeline/thread_pool.h"

namespace treeline::cpu {
namespace {

using test::RandomValues;

struct Dense {
  std::vector<float> values;
  std::int64_t columns;
};

void ReadDense(const void* matrix, std::int64_t row, std::int64_t begin, std::int64_t end,
               float* target) noexcept {
  const auto& dense = *static_cast<const Dense*>(matrix);
  std::copy_n(dense.values.begin() + row * dense.columns + begin, end - begin, target);
}

class MultiplyTest : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, MultiplyTest, testing::ValuesIn(TestedIsas()), IsaName);

// The ways to multiply many tokens.
enum class Way : std::uint8_t { kF32, kBf16, kTwoBf16, kI16 };

class Products {
 public:
  Products(Isa isa, ThreadPool* pool, Way way) : context_{.pool = pool, .isa = isa}, way_(way) {}

  void Run(std::span<const WideProduct> products, const float* x, std::int64_t x_stride,
           std::int64_t tokens) const {
    switch (way_) {
      case Way::kF32:
        return Multiply(context_, products, x, x_stride, tokens);
      case Way::kBf16:
        return MultiplyInBf16(context_, products, x, x_stride, tokens, Bf16Terms::kOne);
      case Way::kTwoBf16:
        return MultiplyInBf16(context_, products, x, x_stride, tokens, Bf16Terms::kTwo);
      case Way::kI16:
        return MultiplyInI16(context_, products, x, x_stride, tokens);
    }
  }
  // A weight and an activation as they enter products, but for rounding to 14 bits.
  double Weight(float x) const { return InBf16() ? Rounded(x) : x; }
  double Activation(float x) const {
    return way_ == Way::kTwoBf16 ? Rounded(x) + Rounded(x - Rounded(x)) : Weight(x);
  }
  // Of a sum of so many products of normally distributed numbers.
  double Tolerance(std::int64_t columns) const {
    const auto n = static_cast<double>(columns);
    // Rounding of a product, five times its standard deviation: to 14 bits, of numbers up to 4, in
    // both factors; of second terms, which are rounded otherwise here where they are halfway.
    double rounding = 0.0;
    if (way_ == Way::kI16) rounding = 5.0 * 4.0 / 8191.0 * std::sqrt(2.0 / 12.0);
    if (way_ == Way::kTwoBf16) rounding = 5.0 / 65536.0;
    return 2e-6 * n + rounding * std::sqrt(n);
  }

 private:
  bool InBf16() const { return way_ == Way::kBf16 || way_ == Way::kTwoBf16; }
  static float Rounded(float x) { return F32FromBF16(BF16FromF32(x)); }

  Context context_;
  Way way_;
};

WideProduct ProductOf(const Dense& matrix, std::int64_t begin, std::int64_t end, float* out,
                      std::int64_t out_stride) {
  return {.rows = {.read = ReadDense,
                   .matrix = &matrix,
                   .row_begin = begin,
                   .row_end = end,
                   .columns = matrix.columns},
          .out = out,
          .out_stride = out_stride};
}

std::vector<Way> WaysOf(Isa isa) {
  std::vector<Way> ways{Way::kF32};
  if (MultipliesInBf16({.isa = isa})) ways.insert(ways.end(), {Way::kBf16, Way::kTwoBf16});
  if (MultipliesInI16({.isa = isa})) ways.push_back(Way::kI16);
  return ways;
}

TEST_P(MultiplyTest, MatchesFloat64AndTouchesNothingElse) {
  ThreadPool pool(2);
  for (const Way way : WaysOf(GetParam())) {
    const Products products(GetParam(), &pool, way);
    for (const std::int64_t tokens : {1, 2, 5, 6, 7, 50, 97}) {
      for (const std::int64_t rows : {1, 3, 16, 17, 47, 48, 49, 100, 140}) {
        for (const std::int64_t columns : {4, 32, 512, 516, 1028}) {
          SCOPED_TRACE(testing::Message() << tokens << " x " << rows << " x " << columns << ", way "
                                          << static_cast<int>(way));
          const std::int64_t first = 2;  // rows before those that are asked for
          const Dense matrix{RandomValues(static_cast<std::size_t>((rows + first) * columns), 1),
                             columns};
          const std::int64_t x_stride = columns + 4;
          const std::vector<float> x = RandomValues(static_cast<std::size_t>(tokens * x_stride), 2);
          const std::int64_t stride = rows + 3;
          constexpr float kUntouched = -7.0f;
          std::vector<float> out(static_cast<std::size_t>(tokens * stride), kUntouched);
          const WideProduct product = ProductOf(matrix, first, first + rows, out.data(), stride);
          products.Run({&product, 1}, x.data(), x_stride, tokens);
          for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t r = 0; r < stride; ++r) {
              const float got = out[static_cast<std::size_t>(t * stride + r)];
              if (r >= rows) {
                ASSERT_EQ(got, kUntouched);
                continue;
              }
              double want = 0.0;
              for (std::int64_t c = 0; c < columns; ++c) {
                want += products.Activation(x[static_cast<std::size_t>(t * x_stride + c)]) *
                        products.Weight(
                            matrix.values[static_cast<std::size_t>((first + r) * columns + c)]);
              }
              ASSERT_NEAR(got, want, products.Tolerance(columns)) << t << ", " << r;
            }
          }
        }
      }
    }
  }
}

// A token's results do not depend on which other tokens, rows and products are computed with it.
TEST_P(MultiplyTest, BitsDependOnTokenAndRowOnly) {
  constexpr std::int64_t kTokens = 37;
  constexpr std::int64_t kRows = 70;
  constexpr std::int64_t kColumns = 600;
  const Dense matrix{RandomValues(kRows * kColumns, 1), kColumns};
  const Dense other{RandomValues(2 * kColumns, 3), kColumns};
  const std::vector<float> x = RandomValues(kTokens * kColumns, 2);
  for (const Way way : WaysOf(GetParam())) {
    const Products products(GetParam(), nullptr, way);
    std::vector<float> all(kTokens * kRows);
    std::vector<float> beside(kTokens * 2);
    const WideProduct together[] = {ProductOf(other, 0, 2, beside.data(), 2),
                                    ProductOf(matrix, 0, kRows, all.data(), kRows)};
    products.Run(together, x.data(), kColumns, kTokens);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (const std::int64_t begin : {0, 5, 33}) {
        std::vector<float> some(static_cast<std::size_t>(kRows - begin));
        const WideProduct alone = ProductOf(matrix, begin, kRows, some.data(), kRows);
        products.Run({&alone, 1}, x.data() + t * kColumns, kColumns, 1);
        for (std::size_t r = 0; r < some.size(); ++r) {
          ASSERT_EQ(some[r], all[static_cast<std::size_t>(t * kRows + begin) + r]);
        }
      }
    }
  }
}

// What is not a number reaches its own token, or its own row, alone.
TEST_P(MultiplyTest, NanAndInfinityStayInTheirRow) {
  constexpr std::int64_t kTokens = 33;
  constexpr std::int64_t kRows = 34;
  constexpr std::int64_t kColumns = 40;
  Dense matrix{RandomValues(kRows * kColumns, 1), kColumns};
  std::vector<float> x = RandomValues(kTokens * kColumns, 2);
  x[32 * kColumns + 39] = std::numeric_limits<float>::quiet_NaN();
  matrix.values[33 * kColumns] = std::numeric_limits<float>::infinity();
  for (const Way way : WaysOf(GetParam())) {
    std::vector<float> out(kTokens * kRows);
    const WideProduct product = ProductOf(matrix, 0, kRows, out.data(), kRows);
    Products(GetParam(), nullptr, way).Run({&product, 1}, x.data(), kColumns, kTokens);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const bool of_token = i / kRows == 32;
      const bool of_row = i % kRows == 33;
      if (of_token) {
        ASSERT_TRUE(std::isnan(out[i])) << i;
      } else {
        ASSERT_EQ(std::isfinite(out[i]), !of_row) << i;
      }
    }
  }
}

TEST_P(MultiplyTest, RowwiseFunctionsMatchFloat64) {
  ThreadPool pool(2);
  const Context context{.pool = &pool, .isa = GetParam()};
  for (const int n : {2, 8, 30, 577}) {
    for (const std::int64_t tokens : {1, 40}) {
      const auto count = static_cast<std::size_t>(n * tokens);
      const std::vector<float> x = RandomValues(count, 1);
      const std::vector<float> weight = RandomValues(static_cast<std::size_t>(n), 2);
      std::vector<float> out(count);
      RmsNorm(context, x.data(), weight.data(), tokens, n, 1e-5f, out.data());
      for (std::int64_t t = 0; t < tokens; ++t) {
        double squares = 0.0;
        for (int i = 0; i < n; ++i)
          squares += std::pow(double{x[static_cast<std::size_t>(t * n + i)]}, 2);
        const double scale = 1.0 / std::sqrt(squares / n + 1e-5);
        for (int i = 0; i < n; ++i) {
          const auto at = static_cast<std::size_t>(t * n + i);
          ASSERT_NEAR(out[at], x[at] * scale * weight[static_cast<std::size_t>(i)], 1e-5);
        }
      }
      std::vector<float> gate = x;
      gate[0] = 100.0f;
      gate[1] = -100.0f;
      const std::vector<float> before = gate;
      const std::vector<float> up = RandomValues(count, 3);
      SwiGlu(context, gate.data(), up.data(), tokens, n);
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_NEAR(gate[i], before[i] / (1.0 + std::exp(-double{before[i]})) * up[i], 1e-4) << i;
      }
    }
  }
}

}  // namespace
}  // namespace treeline::cpu
