// Reproducible decoding: the same bits for every number of ranks that divides 64 and any number of
// threads.

#include <gtest/gtest.h>

#include <random>

#include "cli/rank_check.h"
#include "treeline/errors.h"

namespace treeline::cli {
namespace {

ProblemShape RandomShape(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  ProblemShape shape;
  const int groups[][2] = {{4, 2}, {3, 1}, {2, 2}, {20, 1}};
  const auto& heads = groups[below(4)];
  shape.spec = AttentionSpec::Make(heads[0], heads[1], 8 * static_cast<int>(1 + below(4)));
  shape.spec.causal = below(4) != 0;
  if (below(3) == 0) shape.spec.window = 1 + below(3000);
  if (below(4) == 0) shape.spec.softcap = 4.0f;
  if (below(3) == 0) shape.spec.sinks.assign(static_cast<std::size_t>(heads[0]), 0.5f);
  if (below(4) == 0) {
    shape.spec.alibi_slopes.assign(static_cast<std::size_t>(heads[0]), 0.01f);
  }
  shape.kv_dtype = kAllDTypes[below(4)];
  const std::int64_t tokens = seed % 5 == 0 ? below(130) : below(5001);
  const std::int64_t rows = 1 + below(3);
  shape.sequences.push_back({Positions::Contiguous(std::max<std::int64_t>(tokens - rows, 0), rows),
                             Positions::Contiguous(0, tokens)});
  shape.seed = seed;
  return shape;
}

class ReproducibleTest : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ReproducibleTest, BitsDoNotDependOnRanksThreadsOrSchedule) {
  RankProblem problem(RandomShape(GetParam()));
  std::vector<float> bits;
  for (const int ranks : {1, 2, 4, 8, 16, 32, 64}) {
    for (const int threads : {1, 2, 3}) {
      for (const Schedule schedule : {Schedule::kTree, Schedule::kGather}) {
        if (ranks > 8 && threads > 1 && schedule == Schedule::kGather) continue;
        SCOPED_TRACE(testing::Message()
                     << ranks << " ranks, " << threads << " threads, " << Name(schedule));
        const RankSetup setup{.layout = LayoutKind::kStriped,
                              .ranks = {.ranks = ranks, .threads_per_rank = threads}};
        const RankReport report =
            problem.Decode(setup, {.schedule = schedule, .reproducible = true});
        EXPECT_LE(report.max_error, 1e-5);
        EXPECT_TRUE(report.same_bits);
        if (bits.empty()) bits = report.bits;
        // Bitwise: a NaN would be unequal to itself, and is not expected.
        EXPECT_EQ(bits, report.bits);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ReproducibleTest, testing::Range<std::uint64_t>(0, 20));

TEST(ReproducibleDecodeTest, WhatCannotBeReproducedIsRefused) {
  RankProblem problem(RandomShape(1));
  const auto decode = [&](int ranks, LayoutKind layout, Schedule schedule) {
    problem.Decode({.layout = layout, .ranks = {.ranks = ranks}},
                   {.schedule = schedule, .reproducible = true});
  };
  EXPECT_THROW(decode(3, LayoutKind::kStriped, Schedule::kTree), ArgumentError);
  EXPECT_THROW(decode(2, LayoutKind::kContiguous, Schedule::kTree), ArgumentError);
  EXPECT_THROW(decode(2, LayoutKind::kZigzag, Schedule::kGather), ArgumentError);
  EXPECT_THROW(decode(2, LayoutKind::kStriped, Schedule::kHeads), ArgumentError);
  EXPECT_THROW(decode(2, LayoutKind::kStriped, Schedule::kRingKv), ArgumentError);
}

}  // namespace
}  // namespace treeline::cli
