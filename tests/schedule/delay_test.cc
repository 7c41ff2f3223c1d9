// No schedule depends on who comes first: random schedules with random delays end, and are exact.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "cli/rank_check.h"
#include "schedule/disturbed_communicator.h"

namespace treeline::cli {
namespace {

using namespace std::chrono_literals;

// Tiny: what is tested is who waits for whom.
ProblemShape RandomShape(std::minstd_rand& random, bool square) {
  const auto below = [&](unsigned bound) { return static_cast<std::int64_t>(random() % bound); };
  ProblemShape shape;
  shape.spec = AttentionSpec::Make(2, 1 + static_cast<int>(below(2)), 8);
  shape.spec.causal = below(2) == 0;
  if (below(3) == 0) shape.spec.window = 1 + below(6);
  if (below(3) == 0) shape.spec.sinks = {0.5f, -1.0f};
  if (below(3) == 0) shape.spec.alibi_slopes = {0.5f, 0.25f};
  if (below(3) == 0) shape.kv_dtype = DType::kBF16;
  shape.seed = random();
  for (std::int64_t sequence = below(3); sequence >= 0; --sequence) {
    const std::int64_t keys = below(14);
    const std::int64_t rows = square ? keys : std::min(1 + below(3), keys);
    shape.sequences.push_back(
        {Positions::Contiguous(keys - rows, rows), Positions::Contiguous(0, keys)});
  }
  return shape;
}

class DelayTest : public testing::TestWithParam<unsigned> {};

TEST_P(DelayTest, RandomSchedulesEndAndAreExact) {
  constexpr int kRuns = 1000;
  constexpr std::size_t kProblems = 12;
  constexpr LayoutKind kLayouts[] = {LayoutKind::kContiguous, LayoutKind::kStriped,
                                     LayoutKind::kZigzag};
  std::minstd_rand random(GetParam());
  std::vector<std::unique_ptr<RankProblem>> decoding;
  std::vector<std::unique_ptr<RankProblem>> square;
  for (std::size_t i = 0; i < kProblems; ++i) {
    decoding.push_back(std::make_unique<RankProblem>(RandomShape(random, false)));
    square.push_back(std::make_unique<RankProblem>(RandomShape(random, true)));
  }
  for (int run = 0; run < kRuns; ++run) {
    const std::size_t problem = random() % kProblems;
    const int kind = static_cast<int>(random() % 4);  // decoding twice: it has more schedules
    const std::size_t pick = random() % (std::size(kDecodeSchedules) + 1);
    const Schedule schedule =
        pick < std::size(kDecodeSchedules) ? kDecodeSchedules[pick] : Schedule::kAuto;
    const int node_size = 1 + static_cast<int>(random() % 4);
    const test::Disturbance disturbance{.seed = static_cast<unsigned>(random()),
                                        .delay_percent = static_cast<int>(random() % 30)};
    RankSetup setup{.layout = kLayouts[random() % 3],
                    .ranks = {.ranks = 1 + static_cast<int>(random() % 9), .timeout = 60s},
                    .decorate = [&](Communicator& comm) {
                      return std::make_unique<test::DisturbedCommunicator>(comm, disturbance);
                    }};
    SCOPED_TRACE(testing::Message() << "run " << run << ", kind " << kind << ", problem " << problem
                                    << ", " << Name(schedule) << ", node_size " << node_size << ", "
                                    << Name(setup.layout) << ", " << setup.ranks.ranks << " ranks");
    RankReport report;
    switch (kind) {
      case 0:
      case 1:
        report = decoding[problem]->Decode(setup, {.schedule = schedule, .node_size = node_size});
        break;
      case 2:
        report = square[problem]->Prefill(
            setup, node_size % 2 == 0 ? Schedule::kRingKv : Schedule::kRingQ);
        break;
      default:
        report = square[problem]->Backward(setup);
    }
    ASSERT_LE(report.max_error, report.bound);
    ASSERT_TRUE(report.same_bits);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DelayTest, testing::Range(1u, 11u),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace treeline::cli
