#include "backend/cpu/multiply.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "backend/cpu/rowwise.h"
#include "isa_name.h"
#include "kernels/cpu/kernel_table.h"
#include "random_values.h"
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
INSTANTIATE_TEST_SUITE_P(Isas, MultiplyTest, testing::ValuesIn(AttainableIsas()), IsaName);

TEST_P(MultiplyTest, MatchesFloat64AndTouchesNothingElse) {
  ThreadPool pool(2);
  const Context context{.pool = &pool, .isa = GetParam()};
  for (const std::int64_t tokens : {1, 2, 5, 6, 7, 50, 97}) {
    for (const std::int64_t rows : {1, 3, 16, 17, 47, 48, 49, 100}) {
      for (const std::int64_t columns : {4, 32, 512, 516, 1028}) {
        SCOPED_TRACE(testing::Message() << tokens << " x " << rows << " x " << columns);
        const std::int64_t first = 2;  // rows before those that are asked for
        const Dense matrix{RandomValues(static_cast<std::size_t>((rows + first) * columns), 1),
                           columns};
        const std::vector<float> x = RandomValues(static_cast<std::size_t>(tokens * columns), 2);
        const std::int64_t stride = rows + 3;
        constexpr float kUntouched = -7.0f;
        std::vector<float> out(static_cast<std::size_t>(tokens * stride), kUntouched);
        Multiply(context,
                 {.read = ReadDense,
                  .matrix = &matrix,
                  .row_begin = first,
                  .row_end = first + rows,
                  .columns = columns},
                 x.data(), columns, tokens, out.data(), stride);
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t r = 0; r < stride; ++r) {
            const float got = out[static_cast<std::size_t>(t * stride + r)];
            if (r >= rows) {
              ASSERT_EQ(got, kUntouched);
              continue;
            }
            double want = 0.0;
            for (std::int64_t c = 0; c < columns; ++c) {
              want += double{x[static_cast<std::size_t>(t * columns + c)]} *
                      double{matrix.values[static_cast<std::size_t>((first + r) * columns + c)]};
            }
            ASSERT_NEAR(got, want, 2e-6 * static_cast<double>(columns)) << t << ", " << r;
          }
        }
      }
    }
  }
}

// A token's results do not depend on which other tokens and rows are computed with it.
TEST_P(MultiplyTest, BitsDependOnTokenAndRowOnly) {
  const Context context{.isa = GetParam()};
  constexpr std::int64_t kTokens = 20;
  constexpr std::int64_t kRows = 70;
  constexpr std::int64_t kColumns = 600;
  const Dense matrix{RandomValues(kRows * kColumns, 1), kColumns};
  const std::vector<float> x = RandomValues(kTokens * kColumns, 2);
  std::vector<float> all(kTokens * kRows);
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    return RowSource{.read = ReadDense,
                     .matrix = &matrix,
                     .row_begin = begin,
                     .row_end = end,
                     .columns = kColumns};
  };
  Multiply(context, rows(0, kRows), x.data(), kColumns, kTokens, all.data(), kRows);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (const std::int64_t begin : {0, 5, 33}) {
      std::vector<float> some(static_cast<std::size_t>(kRows - begin));
      Multiply(context, rows(begin, kRows), x.data() + t * kColumns, kColumns, 1, some.data(),
               kRows);
      for (std::size_t r = 0; r < some.size(); ++r) {
        ASSERT_EQ(some[r], all[static_cast<std::size_t>(t * kRows + begin) + r]);
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
