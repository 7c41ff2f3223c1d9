#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "isa_name.h"
#include "treeline/errors.h"
#include "treeline/isa.h"
#include "treeline/partial.h"
#include "treeline/reference.h"
#include "treeline/thread_pool.h"

namespace treeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNoKeysExact = -std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;  // relative rounding error of one f32 operation
constexpr std::uint32_t kCanonicalNaN = 0x7FC00000;

std::uint32_t Bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// NaNs that differ in sign, payload and quietness.
std::vector<float> OddNaNs() {
  std::vector<float> nans;
  for (std::uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7FC12345u, 0xFFFFFFFFu, 0x7FFFFFFFu}) {
    nans.push_back(std::bit_cast<float>(bits));
  }
  return nans;
}

// A partial with memory of its own.
struct Part {
  Part(std::size_t rows, int dim)
      : out(rows * static_cast<std::size_t>(dim), 0.0f), lse(rows, kNoKeys), v_head_dim(dim) {}

  Partial view() { return {out, lse, v_head_dim}; }
  std::size_t rows() const { return lse.size(); }
  std::size_t dim() const { return static_cast<std::size_t>(v_head_dim); }
  std::span<float> row(std::size_t r) { return std::span(out).subspan(r * dim(), dim()); }

  std::vector<float> out;
  std::vector<float> lse;
  int v_head_dim;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](float x, float y) { return Bits(x) == Bits(y); });
}
bool SameBits(const Part& a, const Part& b) {
  return SameBits(a.out, b.out) && SameBits(a.lse, b.lse);
}

// Rows of N(0, 1) with lse uniform around `center`; some rows are empty.
Part RandomPart(std::mt19937& random, std::size_t rows, int dim, float spread, float center = 0.0f,
                double empty = 0.1) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(center - spread, center + spread);
  Part part(rows, dim);
  for (std::size_t r = 0; r < rows; ++r) {
    if (std::bernoulli_distribution(empty)(random)) continue;
    part.lse[r] = uniform(random);
    for (float& x : part.row(r)) x = normal(random);
  }
  return part;
}

std::vector<Part> RandomParts(std::mt19937& random, std::size_t count, std::size_t rows, int dim,
                              float spread, float center = 0.0f) {
  std::vector<Part> parts;
  parts.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    parts.push_back(RandomPart(random, rows, dim, spread, center));
  }
  return parts;
}

Part Merged(std::vector<Part>& parts, const Context& context) {
  std::vector<Partial> views;
  for (Part& part : parts) views.push_back(part.view());
  // Whatever the target holds is overwritten.
  Part target(parts[0].rows(), parts[0].v_head_dim);
  std::fill(target.out.begin(), target.out.end(), std::bit_cast<float>(0xFFFFFFFFu));
  std::fill(target.lse.begin(), target.lse.end(), std::bit_cast<float>(0xFFFFFFFFu));
  Merge(views, target.view(), context);
  return target;
}

Part Merged(const Part& a, const Part& b, const Context& context) {
  std::vector<Part> parts{a, b};
  return Merged(parts, context);
}

// The merge in float64, from the definition.
struct Exact {
  std::vector<double> out;
  std::vector<double> lse;
};
Exact MergedExactly(const std::vector<Part>& parts) {
  Exact exact;
  for (std::size_t r = 0; r < parts[0].rows(); ++r) {
    double highest = kNoKeysExact;
    for (const Part& part : parts) highest = std::max<double>(highest, part.lse[r]);
    std::vector<double> out(parts[0].dim(), 0.0);
    double total = 0.0;
    for (const Part& part : parts) {
      if (part.lse[r] == kNoKeys) continue;
      const double weight = std::exp(part.lse[r] - highest);
      total += weight;
      for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * part.out[r * out.size() + d];
    }
    for (double& x : out) x = total == 0.0 ? 0.0 : x / total;
    exact.out.insert(exact.out.end(), out.begin(), out.end());
    exact.lse.push_back(total == 0.0 ? kNoKeysExact : highest + std::log(total));
  }
  return exact;
}

double LargestLse(const std::vector<Part>& parts) {
  double largest = 1.0;
  for (const Part& part : parts) {
    for (float lse : part.lse) {
      if (std::isfinite(lse)) largest = std::max<double>(largest, std::fabs(lse));
    }
  }
  return largest;
}

class MergeTest : public ::testing::TestWithParam<Isa> {
 protected:
  Context context_{.isa = GetParam()};
  std::mt19937 random_{7};
};

TEST_P(MergeTest, EmptyIsTheIdentity) {
  for (int dim = 8; dim <= AttentionSpec::kMaxHeadDim; dim += 8) {
    const Part part = RandomPart(random_, 5, dim, 1e4f);
    const Part empty(5, dim);
    EXPECT_TRUE(SameBits(Merged(part, empty, context_), part)) << dim;
    EXPECT_TRUE(SameBits(Merged(empty, part, context_), part)) << dim;
    std::vector<Part> alone{part};
    EXPECT_TRUE(SameBits(Merged(alone, context_), part)) << dim;
    std::vector<Part> among_many(70, empty);
    among_many[66] = part;
    EXPECT_TRUE(SameBits(Merged(among_many, context_), part)) << dim;
  }
}

TEST_P(MergeTest, NoPartsGiveTheIdentity) {
  Part target = RandomPart(random_, 3, 8, 1.0f);
  Merge({}, target.view(), context_);
  EXPECT_TRUE(SameBits(target, Part(3, 8)));
}

TEST_P(MergeTest, AllEmptyStaysEmpty) {
  for (std::size_t count : {1, 2, 3, 64, 65, 200}) {
    std::vector<Part> parts(count, Part(4, 24));
    EXPECT_TRUE(SameBits(Merged(parts, context_), Part(4, 24))) << count;
  }
}

TEST_P(MergeTest, NoRowsAtAll) {
  std::vector<Part> parts(3, Part(0, 16));
  EXPECT_EQ(Merged(parts, context_).rows(), 0u);
}

TEST_P(MergeTest, TwoPartsCommuteBitwise) {
  EXPECT_TRUE(rc::check([&] {
    const int dim = 8 * *rc::gen::inRange(1, AttentionSpec::kMaxHeadDim / 8 + 1);
    const auto rows = *rc::gen::inRange<std::size_t>(1, 6);
    std::mt19937 random(*rc::gen::arbitrary<std::uint32_t>());
    // Far apart, where one part has all the weight, and close, where both have some.
    const float spread = *rc::gen::element(1e4f, 100.0f, 1.0f, 0.0f);
    const float center = *rc::gen::element(0.0f, -1e4f, 1e4f);
    const Part a = RandomPart(random, rows, dim, spread, center);
    const Part b = RandomPart(random, rows, dim, spread, center);
    const Part ab = Merged(a, b, context_);
    RC_ASSERT(SameBits(ab, Merged(b, a, context_)));
    Part into = b;
    Part other = a;
    MergeInto(into.view(), other.view(), context_);
    RC_ASSERT(SameBits(ab, into));
    RC_ASSERT(SameBits(other, a));
  }));
}

TEST_P(MergeTest, SpecialValuesCommuteBitwise) {
  std::vector<float> special = OddNaNs();
  for (float x : {0.0f, -0.0f, 1.0f, -1e4f, 1e4f, kInfinity, -kInfinity, 0x1p-149f, 0x1p127f}) {
    special.push_back(x);
  }
  for (float lse_a : special) {
    for (float lse_b : special) {
      for (float out_a : special) {
        Part a(1, 8), b(1, 8);
        a.lse = {lse_a};
        b.lse = {lse_b};
        std::fill(a.out.begin(), a.out.end(), out_a);
        std::copy_n(special.begin(), 8, b.out.begin());
        ASSERT_TRUE(SameBits(Merged(a, b, context_), Merged(b, a, context_)))
            << lse_a << " " << lse_b << " " << out_a;
        std::copy_n(special.end() - 8, 8, b.out.begin());
        ASSERT_TRUE(SameBits(Merged(a, b, context_), Merged(b, a, context_)))
            << lse_a << " " << lse_b << " " << out_a;
      }
    }
  }
}

TEST_P(MergeTest, TwoPartsMatchFloat64) {
  EXPECT_TRUE(rc::check([&] {
    const int dim = 8 * *rc::gen::inRange(1, AttentionSpec::kMaxHeadDim / 8 + 1);
    std::mt19937 random(*rc::gen::arbitrary<std::uint32_t>());
    const float spread = *rc::gen::element(1e4f, 100.0f, 3.0f);
    std::vector<Part> parts = RandomParts(random, 2, 4, dim, spread);
    const Part merged = Merged(parts, context_);
    const Exact exact = MergedExactly(parts);
    // A few operations; the size of lse does not matter, because differences of f32 are accurate.
    RC_ASSERT(reference::MaxError(merged.out, exact.out) <= 12 * kUnit);
    RC_ASSERT(reference::MaxError(merged.lse, exact.lse) <= 4 * kUnit);
  }));
}

TEST_P(MergeTest, ManyPartsAtOnceMatchFloat64) {
  for (std::size_t count : {1, 2, 3, 64, 65, 200}) {
    for (int dim : {8, 24, 64, 128, 576}) {
      std::vector<Part> parts = RandomParts(random_, count, 6, dim, 5.0f);
      const Part merged = Merged(parts, context_);
      const Exact exact = MergedExactly(parts);
      const double bound = (12.0 + static_cast<double>(count)) * kUnit;
      EXPECT_LE(reference::MaxError(merged.out, exact.out), bound) << count << " parts of " << dim;
      EXPECT_LE(reference::MaxError(merged.lse, exact.lse), bound) << count << " parts of " << dim;
    }
  }
}

TEST_P(MergeTest, IsAssociativeUpToRounding) {
  EXPECT_TRUE(rc::check([&] {
    const int dim = 8 * *rc::gen::inRange(1, 20);
    std::mt19937 random(*rc::gen::arbitrary<std::uint32_t>());
    const float center = *rc::gen::element(0.0f, -1e4f, 1e4f);
    std::vector<Part> parts = RandomParts(random, 3, 4, dim, 4.0f, center);
    const Part left = Merged(Merged(parts[0], parts[1], context_), parts[2], context_);
    const Part right = Merged(parts[0], Merged(parts[1], parts[2], context_), context_);
    const Part at_once = Merged(parts, context_);
    const Exact exact = MergedExactly(parts);
    // An lse between two merges is rounded, and that is an error of the next weights.
    const double bound = (16.0 + 2.0 * LargestLse(parts)) * kUnit;
    for (const Part& merged : {left, right, at_once}) {
      RC_ASSERT(reference::MaxError(merged.out, exact.out) <= bound);
      RC_ASSERT(reference::MaxError(merged.lse, exact.lse) <= bound);
    }
  }));
}

TEST_P(MergeTest, TargetMayBeAnyOfTheParts) {
  for (std::size_t count : {1, 2, 3, 64, 65, 200}) {
    std::vector<Part> parts = RandomParts(random_, count, 5, 40, 3.0f);
    const Part expected = Merged(parts, context_);
    for (std::size_t target :
         {std::size_t{0}, count / 2, std::min(count - 1, std::size_t{64}), count - 1}) {
      std::vector<Part> copies = parts;
      std::vector<Partial> views;
      for (Part& part : copies) views.push_back(part.view());
      Merge(views, views[target], context_);
      EXPECT_TRUE(SameBits(copies[target], expected)) << target << " of " << count;
      for (std::size_t i = 0; i < count; ++i) {
        if (i == target) continue;
        EXPECT_TRUE(SameBits(copies[i], parts[i])) << i << " of " << count;
      }
    }
  }
}

TEST_P(MergeTest, PartsAreNotWritten) {
  std::vector<Part> parts = RandomParts(random_, 65, 5, 16, 3.0f);
  const std::vector<Part> before = parts;
  Merged(parts, context_);
  for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(SameBits(parts[i], before[i])) << i;
}

// Merges `bad`, of 3 rows, with empty or full parts, before, among and after them. Row 1 is for
// `check`; rows 0 and 2 must not notice.
void ExpectRowOne(const Part& bad, const Context& context,
                  const std::function<void(std::span<float> out, float lse)>& check) {
  std::mt19937 random(3);
  for (std::size_t others : {0, 1, 2, 64, 70}) {
    for (bool empty : {false, true}) {
      std::vector<Part> parts;
      for (std::size_t i = 0; i < others; ++i) {
        parts.push_back(empty ? Part(3, 24) : RandomPart(random, 3, 24, 2.0f, 0.0f, 0.0));
      }
      for (std::size_t place : {std::size_t{0}, others / 2, others}) {
        std::vector<Part> all = parts;
        all.insert(all.begin() + static_cast<std::ptrdiff_t>(place), bad);
        Part merged = Merged(all, context);
        check(merged.row(1), merged.lse[1]);
        for (std::size_t r : {std::size_t{0}, std::size_t{2}}) {
          EXPECT_TRUE(std::isfinite(merged.lse[r]));
          for (float x : merged.row(r)) EXPECT_TRUE(std::isfinite(x));
        }
      }
    }
  }
}

TEST_P(MergeTest, NaNInLseIsKeptInCanonicalForm) {
  for (float nan : OddNaNs()) {
    Part bad = RandomPart(random_, 3, 24, 2.0f, 0.0f, 0.0);
    bad.lse[1] = nan;
    ExpectRowOne(bad, context_, [](std::span<float> out, float lse) {
      EXPECT_EQ(Bits(lse), kCanonicalNaN);
      for (float x : out) EXPECT_EQ(Bits(x), kCanonicalNaN);
    });
  }
}

TEST_P(MergeTest, NaNInOutIsKeptInCanonicalFormWhereItIs) {
  for (float nan : OddNaNs()) {
    for (std::size_t column : {std::size_t{0}, std::size_t{7}, std::size_t{23}}) {
      Part bad = RandomPart(random_, 3, 24, 2.0f, 0.0f, 0.0);
      bad.row(1)[column] = nan;
      ExpectRowOne(bad, context_, [&](std::span<float> out, float lse) {
        EXPECT_TRUE(std::isfinite(lse));
        for (std::size_t d = 0; d < out.size(); ++d) {
          if (d == column) {
            EXPECT_EQ(Bits(out[d]), kCanonicalNaN);
          } else {
            EXPECT_TRUE(std::isfinite(out[d]));
          }
        }
      });
    }
  }
}

// Two NaNs of different payload: hardware would keep the first operand's.
TEST_P(MergeTest, NaNsOfTwoPartsAreCanonical) {
  const std::vector<float> nans = OddNaNs();
  for (float first : nans) {
    for (float second : nans) {
      Part a = RandomPart(random_, 1, 16, 1.0f, 0.0f, 0.0);
      Part b = RandomPart(random_, 1, 16, 1.0f, 0.0f, 0.0);
      std::fill(a.out.begin(), a.out.end(), first);
      std::fill(b.out.begin(), b.out.end(), second);
      for (float x : Merged(a, b, context_).out) EXPECT_EQ(Bits(x), kCanonicalNaN);
      a.lse[0] = first;
      b.lse[0] = second;
      EXPECT_EQ(Bits(Merged(a, b, context_).lse[0]), kCanonicalNaN);
    }
  }
}

// An infinite score has no softmax. It must not be taken for a weight of 1, nor be lost.
TEST_P(MergeTest, PlusInfinityBecomesNaN) {
  Part bad = RandomPart(random_, 3, 24, 2.0f, 0.0f, 0.0);
  bad.lse[1] = kInfinity;
  ExpectRowOne(bad, context_, [](std::span<float> out, float lse) {
    EXPECT_EQ(Bits(lse), kCanonicalNaN);
    for (float x : out) EXPECT_EQ(Bits(x), kCanonicalNaN);
  });
}

TEST_P(MergeTest, OutOfEmptyRowsDoesNotMatterWhereAllAreEmpty) {
  std::vector<Part> parts(3, Part(2, 16));
  for (Part& part : parts) std::fill(part.out.begin(), part.out.end(), 5.0f);
  std::fill(parts[1].out.begin(), parts[1].out.end(), OddNaNs()[2]);
  EXPECT_TRUE(SameBits(Merged(parts, context_), Part(2, 16)));
}

TEST_P(MergeTest, ThreadsGiveTheSameBits) {
  for (std::size_t count : {2, 5, 70}) {
    // A few items per thread; see kValuesPerItem.
    const std::size_t rows = count > 5 ? 40 : 1000;
    std::vector<Part> parts = RandomParts(random_, count, rows, 64, 3.0f);
    const Part alone = Merged(parts, context_);
    for (int threads : {1, 2, 5}) {
      ThreadPool pool(threads, std::chrono::microseconds(0));
      const Context parallel{.pool = &pool, .isa = GetParam()};
      EXPECT_TRUE(SameBits(Merged(parts, parallel), alone)) << count << " parts, " << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, MergeTest, ::testing::ValuesIn(AttainableIsas()), IsaName);

// Shapes are checked before anything is written.
class MergeShapeTest : public ::testing::Test {
 protected:
  void ExpectError(const Partial& part, const Partial& target, const std::string& first,
                   const std::string& second = "") {
    const std::vector<float> out = target_.out;
    const std::vector<float> lse = target_.lse;
    for (std::size_t place : {0, 2}) {
      std::vector<Partial> parts(3, good_.view());
      parts[place] = part;
      EXPECT_THAT([&] { Merge(parts, target); },
                  ThrowsMessage<ArgumentError>(AllOf(HasSubstr(first), HasSubstr(second))));
      EXPECT_TRUE(SameBits(target_.out, out));
      EXPECT_TRUE(SameBits(target_.lse, lse));
    }
  }

  std::mt19937 random_{5};
  Part good_ = RandomPart(random_, 6, 16, 1.0f);
  Part target_ = RandomPart(random_, 6, 16, 1.0f);
};

TEST_F(MergeShapeTest, DifferentRowsAreNamed) {
  Part fewer = RandomPart(random_, 5, 16, 1.0f);
  ExpectError(fewer.view(), target_.view(), "5 rows of 16", "6 rows of 16");
}

TEST_F(MergeShapeTest, DifferentDimsAreNamed) {
  Part wider = RandomPart(random_, 6, 24, 1.0f);
  ExpectError(wider.view(), target_.view(), "6 rows of 24", "6 rows of 16");
}

TEST_F(MergeShapeTest, BadDimsAreNamed) {
  for (int dim : {0, -8, 4, 12, 584}) {
    Partial bad = good_.view();
    bad.v_head_dim = dim;
    ExpectError(bad, target_.view(), "v_head_dim " + std::to_string(dim));
    Partial bad_target = target_.view();
    bad_target.v_head_dim = dim;
    ExpectError(good_.view(), bad_target, "v_head_dim " + std::to_string(dim));
  }
}

TEST_F(MergeShapeTest, OutThatDoesNotFitItsRowsIsNamed) {
  Partial bad = good_.view();
  bad.out = bad.out.first(95);
  ExpectError(bad, target_.view(), "95 values", "6 rows of 16");
  Partial bad_target = target_.view();
  bad_target.lse = bad_target.lse.first(4);
  ExpectError(good_.view(), bad_target, "96 values", "4 rows of 16");
}

TEST_F(MergeShapeTest, MergeIntoChecksToo) {
  Part fewer = RandomPart(random_, 5, 16, 1.0f);
  EXPECT_THAT([&] { MergeInto(target_.view(), fewer.view()); },
              ThrowsMessage<ArgumentError>(HasSubstr("5 rows of 16")));
}

class ApplySinksTest : public ::testing::Test {
 protected:
  static AttentionSpec Spec() {
    AttentionSpec spec = AttentionSpec::Make(3, 1, 32);
    spec.v_head_dim = 16;
    spec.sinks = {-2.0f, 0.5f, 30.0f};
    return spec;
  }

  std::mt19937 random_{11};
  const AttentionSpec spec_ = Spec();
};

TEST_F(ApplySinksTest, MatchesFloat64) {
  for (float spread : {1.0f, 10.0f, 1e4f}) {
    Part part = RandomPart(random_, 300, 16, spread);
    Exact exact;
    for (std::size_t r = 0; r < part.rows(); ++r) {
      const double sink = spec_.sinks[r % 3];
      const double highest = std::max<double>(sink, part.lse[r]);
      const double weight = std::exp(part.lse[r] - highest);
      const double total = weight + std::exp(sink - highest);
      for (float x : part.row(r)) exact.out.push_back(x * weight / total);
      exact.lse.push_back(highest + std::log(total));
    }
    ApplySinks(spec_, part.view());
    EXPECT_LE(reference::MaxError(part.out, exact.out), 8 * kUnit) << spread;
    EXPECT_LE(reference::MaxError(part.lse, exact.lse), 4 * kUnit) << spread;
  }
}

TEST_F(ApplySinksTest, RowWithoutKeysHasTheSinkAlone) {
  Part part(6, 16);
  ApplySinks(spec_, part.view());
  for (std::size_t r = 0; r < part.rows(); ++r) EXPECT_EQ(part.lse[r], spec_.sinks[r % 3]);
  EXPECT_TRUE(SameBits(part.out, Part(6, 16).out));
}

TEST_F(ApplySinksTest, NaNIsKept) {
  Part part = RandomPart(random_, 6, 16, 1.0f, 0.0f, 0.0);
  part.lse[1] = OddNaNs()[0];
  part.row(3)[5] = OddNaNs()[0];
  ApplySinks(spec_, part.view());
  EXPECT_TRUE(std::isnan(part.lse[1]));
  EXPECT_TRUE(std::isnan(part.row(3)[5]));
  EXPECT_TRUE(std::isfinite(part.lse[3]));
  EXPECT_TRUE(std::isfinite(part.row(3)[4]));
}

TEST_F(ApplySinksTest, TwiceIsNotOnce) {
  Part once = RandomPart(random_, 3, 16, 1.0f, 0.0f, 0.0);
  ApplySinks(spec_, once.view());
  Part twice = once;
  ApplySinks(spec_, twice.view());
  for (std::size_t r = 0; r < 3; ++r) EXPECT_GT(twice.lse[r], once.lse[r] + 1e-3f) << r;
}

// Added once after the merge, a sink gives what one pass over all keys and the sink gives.
TEST_F(ApplySinksTest, IsAMergeWithAPartThatHasNoValue) {
  Part part = RandomPart(random_, 30, 16, 3.0f);
  Part sink(30, 16);
  for (std::size_t r = 0; r < sink.rows(); ++r) sink.lse[r] = spec_.sinks[r % 3];
  const Exact exact = MergedExactly({part, sink});
  ApplySinks(spec_, part.view());
  EXPECT_LE(reference::MaxError(part.out, exact.out), 8 * kUnit);
  EXPECT_LE(reference::MaxError(part.lse, exact.lse), 4 * kUnit);
}

TEST_F(ApplySinksTest, WithoutSinksNothingIsTouched) {
  AttentionSpec spec = spec_;
  spec.sinks.clear();
  Part part = RandomPart(random_, 6, 16, 1.0f);
  const Part before = part;
  ApplySinks(spec, part.view());
  EXPECT_TRUE(SameBits(part, before));
}

TEST_F(ApplySinksTest, BadShapesAreNamed) {
  Part part = RandomPart(random_, 6, 16, 1.0f);
  const Part before = part;
  Partial four_rows{std::span(part.out).first(64), std::span(part.lse).first(4), 16};
  EXPECT_THAT([&] { ApplySinks(spec_, four_rows); },
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("4 rows"), HasSubstr("3 heads"))));
  Partial narrow{std::span(part.out).first(48), part.lse, 8};
  EXPECT_THAT([&] { ApplySinks(spec_, narrow); },
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("rows of 8"), HasSubstr("16"))));
  Partial short_out{std::span(part.out).first(95), part.lse, 16};
  EXPECT_THAT([&] { ApplySinks(spec_, short_out); },
              ThrowsMessage<ArgumentError>(HasSubstr("95 values")));
  AttentionSpec bad = spec_;
  bad.sinks.resize(2);
  EXPECT_THAT([&] { ApplySinks(bad, part.view()); },
              ThrowsMessage<ArgumentError>(HasSubstr("sinks has 2 values")));
  EXPECT_TRUE(SameBits(part, before));
}

}  // namespace
}  // namespace treeline
