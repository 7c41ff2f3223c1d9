// Products with weights of every kind, against float64 on what ggml reads from the same bytes.

#include "model/linear.h"

#include <ggml.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "isa_name.h"
#include "random_values.h"
#include "treeline/isa.h"
#include "treeline/thread_pool.h"

namespace treeline::model {
namespace {

using test::RandomValues;

// Random weights, packed by ggml.
class Weights {
 public:
  Weights(ggml_type type, std::int64_t rows, std::int64_t columns)
      : bytes_(ggml_row_size(type, columns) * static_cast<std::size_t>(rows)),
        matrix_{.data = bytes_.data(),
                .type = type,
                .rows = rows,
                .columns = columns,
                .row_bytes = ggml_row_size(type, columns)} {
    const std::vector<float> values = RandomValues(static_cast<std::size_t>(rows * columns), 1);
    // Some types want to know how much each column matters.
    const std::vector<float> alike(static_cast<std::size_t>(columns), 1.0f);
    ggml_quantize_chunk(type, values.data(), bytes_.data(), 0, rows, columns, alike.data());
  }
  const Matrix& matrix() const { return matrix_; }

 private:
  std::vector<std::byte> bytes_;
  Matrix matrix_;
};

constexpr ggml_type kTypes[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0,
                                GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K,
                                GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS};

class LinearTest : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, LinearTest, testing::ValuesIn(AttainableIsas()), IsaName);

TEST_P(LinearTest, MatchesFloat64) {
  ThreadPool pool(2);
  const Context context{.pool = &pool, .isa = GetParam()};
  constexpr std::int64_t kRows = 37;
  for (const ggml_type type : kTypes) {
    for (const std::int64_t columns : {256, 768}) {
      const Weights weights(type, kRows, columns);
      for (const std::int64_t tokens : {1, 3, 8}) {
        std::vector<float> x = RandomValues(static_cast<std::size_t>(tokens * columns), 2);
        x[5] = 300.0f;  // an outlier, as activations have
        for (const Activations activations : {Activations::kI16, Activations::kF32}) {
          SCOPED_TRACE(testing::Message() << ggml_type_name(type) << ", " << columns << " columns, "
                                          << tokens << " tokens");
          const Linear linear(context, activations);
          constexpr std::int64_t kBegin = 3;
          constexpr std::int64_t kStride = kRows - kBegin;
          std::vector<float> out(static_cast<std::size_t>(tokens * kStride));
          const Product product{&weights.matrix(), kBegin, kRows, out.data(), kStride};
          linear.Multiply({&product, 1}, x.data(), tokens, true);
          std::vector<float> row(static_cast<std::size_t>(columns));
          for (std::int64_t r = kBegin; r < kRows; ++r) {
            weights.matrix().Read(r, row.data());
            for (std::int64_t t = 0; t < tokens; ++t) {
              double want = 0.0;
              double rounding = 0.0;  // what a part in 2^16 of the largest of each block can do
              for (std::int64_t c = 0; c < columns; ++c) {
                const double activation = x[static_cast<std::size_t>(t * columns + c)];
                const double weight = row[static_cast<std::size_t>(c)];
                const bool with_outlier = t == 0 && c < 32;
                want += activation * weight;
                rounding += std::pow(weight * (with_outlier ? 300.0 : 4.0) / 65536.0, 2);
              }
              ASSERT_NEAR(out[static_cast<std::size_t>(t * kStride + r - kBegin)], want,
                          5.0 * std::sqrt(rounding) + 1e-6 * static_cast<double>(columns))
                  << "row " << r << ", token " << t;
            }
          }
        }
      }
    }
  }
}

// A token's results do not depend on which other tokens and rows are computed with it.
TEST_P(LinearTest, BitsDependOnTokenAndRowOnly) {
  ThreadPool pool(2);
  constexpr std::int64_t kRows = 50;
  constexpr std::int64_t kColumns = 512;
  constexpr std::int64_t kTokens = 5;
  const std::vector<float> x = RandomValues(kTokens * kColumns, 2);
  for (const ggml_type type : kTypes) {
    const Weights weights(type, kRows, kColumns);
    std::vector<float> all(kTokens * kRows);
    const Product rows{&weights.matrix(), 0, kRows, all.data(), kRows};
    Linear({.pool = &pool, .isa = GetParam()}, Activations::kI16)
        .Multiply({&rows, 1}, x.data(), kTokens, true);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t r = 0; r < kRows; r += 7) {
        float one = 0.0f;
        const Product row{&weights.matrix(), r, r + 1, &one, 1};
        Linear({.isa = GetParam()}, Activations::kI16)
            .Multiply({&row, 1}, x.data() + t * kColumns, 1, true);
        ASSERT_EQ(one, all[static_cast<std::size_t>(t * kRows + r)]) << ggml_type_name(type);
      }
    }
  }
}

// Matrices of different types and sizes, of which a rank may have no row, one or all.
TEST_P(LinearTest, ProductsTogetherAreThoseOfEachAlone) {
  ThreadPool pool(2);
  const Linear linear({.pool = &pool, .isa = GetParam()}, Activations::kI16);
  constexpr std::int64_t kColumns = 512;
  constexpr std::int64_t kTokens = 3;
  constexpr std::int64_t kStride = 400;
  const std::vector<float> x = RandomValues(kTokens * kColumns, 2);
  const Weights packed(GGML_TYPE_Q4_K, 300, kColumns);
  const Weights widened(GGML_TYPE_Q5_0, 20, kColumns);
  const Weights other(GGML_TYPE_Q8_0, 80, kColumns);
  std::vector<float> together(kTokens * kStride);
  std::vector<float> apart(kTokens * kStride);
  const auto products = [&](std::vector<float>& out) {
    return std::array<Product, 5>{{{&packed.matrix(), 1, 299, out.data(), kStride},
                                   {&widened.matrix(), 0, 20, out.data() + 298, kStride},
                                   {&other.matrix(), 7, 7, out.data() + 318, kStride},
                                   {&other.matrix(), 79, 80, out.data() + 318, kStride},
                                   {&other.matrix(), 0, 80, out.data() + 319, kStride}}};
  };
  linear.Multiply(products(together), x.data(), kTokens, true);
  for (const Product& product : products(apart)) {
    linear.Multiply({&product, 1}, x.data(), kTokens, true);
  }
  EXPECT_EQ(together, apart);
  EXPECT_NE(together[318], 0.0f);
  EXPECT_NE(together[398], 0.0f);
  EXPECT_EQ(together[399], 0.0f);  // nothing is written beyond
}

TEST_P(LinearTest, WhatIsNotFiniteStaysSo) {
  constexpr std::int64_t kColumns = 256;
  for (const ggml_type type : kTypes) {
    const Weights weights(type, 2, kColumns);
    for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
      std::vector<float> x = RandomValues(kColumns, 2);
      x[100] = bad;
      std::vector<float> out(2);
      const Product product{&weights.matrix(), 0, 2, out.data(), 2};
      Linear({.isa = GetParam()}, Activations::kI16).Multiply({&product, 1}, x.data(), 1, true);
      EXPECT_FALSE(std::isfinite(out[0])) << ggml_type_name(type) << ", " << bad;
    }
    // All zeros have no largest to divide by.
    const std::vector<float> zeros(kColumns);
    std::vector<float> out{1.0f, 1.0f};
    const Product product{&weights.matrix(), 0, 2, out.data(), 2};
    Linear({.isa = GetParam()}, Activations::kI16).Multiply({&product, 1}, zeros.data(), 1, true);
    EXPECT_EQ(out[0], 0.0f);
  }
}

}  // namespace
}  // namespace treeline::model
