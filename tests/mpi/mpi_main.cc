// Runs tests of schedules over the processes that mpirun has started: those whose parameter is
// their number, and those that take any.

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <string_view>

#include "cli/ranks.h"

namespace treeline::cli {
namespace {

// What a rank prints that is not the first: failures.
class FailurePrinter final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", Processes()->rank(),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
  }
};

// Tests that were run, of suites whose names hold `part`.
int RunTests(std::string_view part) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  int count = 0;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    if (std::string_view(suite.name()).find(part) != std::string_view::npos) {
      count += suite.test_to_run_count();
    }
  }
  return count;
}

int Run(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int ranks = JoinRanks({.comm = "mpi"}, {}, {}, 1).front();
  GTEST_FLAG_SET(filter, "*RanksTest.*/" + std::to_string(ranks) + ":ProcessTest.*");
  if (!IsFirst()) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  if (RUN_ALL_TESTS() != 0) return 1;
  if (RunTests("RanksTest") == 0 || RunTests("ProcessTest") == 0) {
    std::fprintf(stderr, "no test for %d ranks\n", ranks);
    return 1;
  }
  LeaveRanks();
  return 0;
}

}  // namespace
}  // namespace treeline::cli

int main(int argc, char** argv) {
  int code = 1;
  try {
    code = treeline::cli::Run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  if (code != 0) treeline::cli::EndRanks(code);
  return code;
}
