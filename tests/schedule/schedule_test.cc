// Every schedule, layout and option over ranks, against the float64 oracle.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>

#include "cli/check.h"
#include "cli/deal.h"
#include "cli/rank_check.h"
#include "sanitized.h"

namespace treeline::cli {
namespace {

constexpr LayoutKind kLayouts[] = {LayoutKind::kContiguous, LayoutKind::kStriped,
                                   LayoutKind::kZigzag};

// What can be asked of attention; each changes one thing of a causal default.
struct Option {
  const char* name;
  std::function<void(ProblemShape&)> apply;
};

const std::vector<Option>& Options() {
  static const std::vector<Option> options{
      {"causal", [](ProblemShape&) {}},
      {"full", [](ProblemShape& s) { s.spec.causal = false; }},
      {"window", [](ProblemShape& s) { s.spec.window = 7; }},
      {"softcap", [](ProblemShape& s) { s.spec.softcap = 3.0f; }},
      {"alibi",
       [](ProblemShape& s) {
         s.spec.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
       }},
      {"sinks",
       [](ProblemShape& s) {
         s.spec.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
       }},
      {"values", [](ProblemShape& s) { s.spec.v_head_dim = 24; }},
      {"bf16", [](ProblemShape& s) { s.q_dtype = s.kv_dtype = DType::kBF16; }},
      {"f16", [](ProblemShape& s) { s.kv_dtype = DType::kF16; }},
      {"everything",
       [](ProblemShape& s) {
         s.spec.window = 50;
         s.spec.softcap = 5.0f;
         s.spec.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
         s.spec.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
       }},
  };
  return options;
}

ProblemShape BaseShape() {
  ProblemShape shape;
  shape.spec = AttentionSpec::Make(4, 2, 16);
  shape.spec.causal = true;
  shape.seed = 3;
  return shape;
}

// Decoding of two rows over `tokens` keys, beside a sequence of another length.
ProblemShape DecodeShape(std::int64_t tokens) {
  ProblemShape shape = BaseShape();
  const std::int64_t rows = 2;
  shape.sequences.push_back({Positions::Contiguous(std::max<std::int64_t>(tokens - rows, 0), rows),
                             Positions::Contiguous(0, tokens)});
  shape.sequences.push_back({Positions::Contiguous(4, 1), Positions::Contiguous(0, 5)});
  return shape;
}

// Self-attention over two packed sequences.
ProblemShape PrefillShape(std::int64_t tokens) {
  ProblemShape shape = BaseShape();
  for (const std::int64_t length : {tokens, std::int64_t{5}}) {
    shape.sequences.push_back({Positions::Contiguous(0, length), Positions::Contiguous(0, length)});
  }
  return shape;
}

std::vector<std::int64_t> Lengths() {
  if (kSanitized) return {1, 65};
  return {0, 1, 2, 63, 64, 65};
}

RankSetup SetupOf(LayoutKind layout, int ranks) {
  return {.layout = layout, .ranks = {.ranks = ranks}};
}

class RanksTest : public testing::TestWithParam<int> {};

TEST_P(RanksTest, DecodeIsExactForEveryScheduleLayoutAndOption) {
  for (const std::int64_t tokens : Lengths()) {
    for (const Option& option : Options()) {
      ProblemShape shape = DecodeShape(tokens);
      option.apply(shape);
      RankProblem problem(shape);
      for (const LayoutKind layout : kLayouts) {
        for (const Schedule schedule : kDecodeSchedules) {
          SCOPED_TRACE(testing::Message() << tokens << " tokens, " << option.name << ", "
                                          << Name(layout) << ", " << Name(schedule));
          const RankReport report =
              problem.Decode(SetupOf(layout, GetParam()), {.schedule = schedule, .node_size = 3});
          EXPECT_LE(report.max_error, report.bound);
          EXPECT_TRUE(report.same_bits);
        }
      }
    }
  }
}

// Kernels read pages in another order than rows that lie one after the other, which changes bits.
TEST_P(RanksTest, DecodeOfPagedKeysGivesTheSameBitsOnAllRanks) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kQ8_0}) {
    ProblemShape shape = DecodeShape(1000);
    shape.kv_dtype = dtype;
    RankProblem problem(shape);
    for (const Schedule schedule : kDecodeSchedules) {
      SCOPED_TRACE(testing::Message() << Name(dtype) << ", " << Name(schedule));
      RankSetup setup = SetupOf(LayoutKind::kContiguous, GetParam());
      setup.page_slots = 16;
      const RankReport report = problem.Decode(setup, {.schedule = schedule, .node_size = 3});
      EXPECT_LE(report.max_error, report.bound);
      EXPECT_TRUE(report.same_bits);
    }
  }
}

TEST_P(RanksTest, PrefillIsExactForEveryScheduleLayoutAndOption) {
  for (const std::int64_t tokens : Lengths()) {
    for (const Option& option : Options()) {
      ProblemShape shape = PrefillShape(tokens);
      option.apply(shape);
      RankProblem problem(shape);
      for (const LayoutKind layout : kLayouts) {
        for (const Schedule schedule : {Schedule::kRingKv, Schedule::kRingQ}) {
          SCOPED_TRACE(testing::Message() << tokens << " tokens, " << option.name << ", "
                                          << Name(layout) << ", " << Name(schedule));
          const RankReport report = problem.Prefill(SetupOf(layout, GetParam()), schedule);
          EXPECT_LE(report.max_error, report.bound);
        }
      }
    }
  }
}

TEST_P(RanksTest, GradientsAreExactForEveryLayoutAndOption) {
  for (const std::int64_t tokens : Lengths()) {
    for (const Option& option : Options()) {
      ProblemShape shape = PrefillShape(tokens);
      option.apply(shape);
      RankProblem problem(shape);
      for (const LayoutKind layout : kLayouts) {
        SCOPED_TRACE(testing::Message()
                     << tokens << " tokens, " << option.name << ", " << Name(layout));
        const RankReport report = problem.Backward(SetupOf(layout, GetParam()));
        EXPECT_LE(report.max_error, report.bound);
        EXPECT_TRUE(report.same_bits);
      }
    }
  }
}

// Hosts of unlike sizes, and ranks that are dealt to them by turns.
TEST(HostsTest, TwoLevelFollowsThem) {
  const std::vector<std::vector<int>> cases{{0}, {0, 0, 0, 1}, {0, 1, 1, 1, 2}, {0, 1, 0, 1, 0, 2}};
  RankProblem problem(DecodeShape(65));
  for (const std::vector<int>& hosts : cases) {
    RankSetup setup = SetupOf(LayoutKind::kStriped, static_cast<int>(hosts.size()));
    setup.ranks.hosts = hosts;
    const RankReport report = problem.Decode(setup, {.schedule = Schedule::kTwoLevel});
    EXPECT_LE(report.max_error, report.bound);
    EXPECT_TRUE(report.same_bits);
    // A rank that does not lead its host sends one message, to the one that does.
    std::vector<bool> seen(hosts.size());
    for (std::size_t r = 0; r < hosts.size(); ++r) {
      const auto host = static_cast<std::size_t>(hosts[r]);
      if (seen[host]) {
        EXPECT_EQ(report.counters[r].messages, 1) << "rank " << r;
      }
      seen[host] = true;
    }
  }
}

// Rows of q8_0 end at any even byte; f32 rows in the same message must still be aligned.
TEST(MixedTypesTest, SequencesOfAllTypesGoRoundTogether) {
  constexpr int kRanks = 3;
  constexpr std::int64_t kTokens = 5 * kRanks;
  std::vector<std::unique_ptr<Problem>> problems;
  for (const DType dtype : {DType::kQ8_0, DType::kF32, DType::kF16, DType::kBF16}) {
    ProblemShape shape;
    shape.spec = AttentionSpec::Make(2, 1, 40);
    shape.spec.v_head_dim = 32;
    shape.kv_dtype = dtype;
    shape.sequences = {{Positions::Contiguous(kTokens - 1, 1), Positions::Contiguous(0, kTokens)}};
    problems.push_back(std::make_unique<Problem>(shape));
  }
  const AttentionSpec& spec = problems[0]->spec();
  const Layout layout = Layout::Contiguous(kTokens, kRanks);
  std::vector<Positions> shards;
  for (int r = 0; r < kRanks; ++r) shards.push_back(layout.Shard(r));

  RunRanks({.ranks = kRanks}, [&](Communicator& comm) {
    CpuBackend backend;
    const Positions& own = shards[static_cast<std::size_t>(comm.rank())];
    std::vector<DealtKeys> keys;
    std::vector<std::vector<float>> out(problems.size(), std::vector<float>(2 * 32));
    std::vector<std::vector<float>> lse(problems.size(), std::vector<float>(2));
    std::vector<ShardedTask> tasks;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      AttendTask local = problems[i]->tasks()[0];
      keys.push_back(DealKeys(local.kv, own));
      local.kv = keys.back().view;
      local.kv_positions = own;
      local.result = {out[i], lse[i], spec.v_head_dim};
      tasks.push_back({.local = local, .kv_shards = shards});
    }
    Decode(comm, backend, spec, tasks, {.schedule = Schedule::kRingKv});
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const reference::Result want = reference::Attend(spec, problems[i]->tasks()[0]);
      EXPECT_LE(reference::MaxError(out[i], want.out), Bound(Kernel::kDecode))
          << problems[i]->shape().Describe();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Few, RanksTest, testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9),
                         testing::PrintToStringParamName());
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(Many, RanksTest, testing::Values(64), testing::PrintToStringParamName());
#endif

}  // namespace
}  // namespace treeline::cli
