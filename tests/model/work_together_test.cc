#include "model/work_together.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "treeline/comm.h"
#include "treeline/errors.h"

namespace treeline::model {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int kRanks = 3;

TEST(WorkTogetherTest, AnErrorOfOneRankStopsAllAndIsThrownByAll) {
  std::vector<std::string> thrown(kRanks);
  std::vector<int> undone(kRanks);
  std::vector<char> stopped(kRanks);
  RunRanks({.ranks = kRanks}, [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto work = [&](const Stop& stop) {
      if (rank == 1) throw FormatError("the disk of rank 1 is full");
      const auto deadline = steady_clock::now() + seconds(30);
      while (!stop && steady_clock::now() < deadline) std::this_thread::yield();
      stopped[rank] = stop;
    };
    try {
      WorkTogether(comm, work, [&] { ++undone[rank]; });
    } catch (const FormatError& error) {
      thrown[rank] = error.what();
    }
    WorkTogether(comm, [](const Stop&) {});  // the group can go on
  });
  EXPECT_THAT(thrown, testing::Each("the disk of rank 1 is full"));
  EXPECT_THAT(undone, testing::Each(1));
  EXPECT_THAT(stopped, testing::ElementsAre(1, 0, 1));
}

TEST(WorkTogetherTest, MayTakeLongerThanRanksWait) {
  std::vector<char> done(kRanks);
  RunRanks({.ranks = kRanks, .timeout = std::chrono::milliseconds(1000)}, [&](Communicator& comm) {
    WorkTogether(comm, [&](const Stop&) {
      if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      done[static_cast<std::size_t>(comm.rank())] = 1;
    });
    EXPECT_THAT(done, testing::Each(1));
  });
}

}  // namespace
}  // namespace treeline::model
