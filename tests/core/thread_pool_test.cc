#include "treeline/thread_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "treeline/errors.h"

namespace treeline {
namespace {

using namespace std::chrono_literals;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct PoolCase {
  int threads;
  std::chrono::microseconds spin;
};

class ThreadPoolTest : public ::testing::TestWithParam<PoolCase> {
 protected:
  ThreadPool pool_{GetParam().threads, GetParam().spin};
  const std::size_t threads_ = static_cast<std::size_t>(GetParam().threads);
};

TEST_P(ThreadPoolTest, EveryThreadRunsOnce) {
  EXPECT_EQ(pool_.threads(), GetParam().threads);
  std::vector<int> calls(threads_, 0);
  std::vector<std::thread::id> ids(threads_);
  pool_.Run([&](int thread) {
    calls[static_cast<std::size_t>(thread)] += 1;
    ids[static_cast<std::size_t>(thread)] = std::this_thread::get_id();
  });
  EXPECT_THAT(calls, Each(1));
  EXPECT_EQ(ids[0], std::this_thread::get_id()) << "the caller is thread 0";
  EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), threads_);
}

// No atomics: each region reads what another thread wrote in the one before, and the caller reads
// what all wrote.
TEST_P(ThreadPoolTest, RegionsSeeEachOthersWrites) {
  const int regions = threads_ > 8 ? 200 : 2000;
  std::vector<int> before(threads_, 0), after(threads_, 0);
  for (int region = 0; region < regions; ++region) {
    pool_.Run([&](int thread) {
      const auto t = static_cast<std::size_t>(thread);
      after[t] = before[(t + 1) % threads_] + 1;
    });
    ASSERT_THAT(after, Each(region + 1));
    std::swap(before, after);
  }
}

TEST_P(ThreadPoolTest, WakesThreadsThatSleep) {
  for (int region = 0; region < 5; ++region) {
    std::this_thread::sleep_for(2ms);  // longer than any spin here
    std::vector<int> calls(threads_, 0);
    pool_.Run([&](int thread) { calls[static_cast<std::size_t>(thread)] += 1; });
    ASSERT_THAT(calls, Each(1));
  }
}

TEST_P(ThreadPoolTest, WaitsForTheSlowestThread) {
  std::vector<int> done(threads_, 0);
  pool_.Run([&](int thread) {
    if (thread == GetParam().threads - 1) std::this_thread::sleep_for(5ms);
    done[static_cast<std::size_t>(thread)] = 1;
  });
  EXPECT_THAT(done, Each(1));
}

INSTANTIATE_TEST_SUITE_P(Pools, ThreadPoolTest,
                         ::testing::Values(PoolCase{1, 50us}, PoolCase{2, 50us}, PoolCase{2, 0us},
                                           PoolCase{3, 0us}, PoolCase{7, 0us}, PoolCase{64, 0us}),
                         [](const auto& instance) {
                           return std::to_string(instance.param.threads) + "_threads_" +
                                  std::to_string(instance.param.spin.count()) + "_us";
                         });

TEST(ThreadPoolLifeTest, EndsWithoutARegionAndRightAfterOne) {
  for (int i = 0; i < 50; ++i) {
    const ThreadPool idle(3, 0us);
    ThreadPool used(3, 0us);
    std::vector<int> calls(3, 0);
    used.Run([&](int thread) { calls[static_cast<std::size_t>(thread)] += 1; });
    ASSERT_THAT(calls, Each(1));
  }
}

TEST(ThreadPoolLifeTest, PoolsDoNotDisturbEachOther) {
  std::vector<std::thread> callers;
  std::vector<int> sums(3, 0);
  for (std::size_t caller = 0; caller < sums.size(); ++caller) {
    callers.emplace_back([&sums, caller] {
      ThreadPool pool(3, 0us);
      std::vector<int> calls(3, 0);
      for (int region = 0; region < 300; ++region) {
        pool.Run([&](int thread) { calls[static_cast<std::size_t>(thread)] += 1; });
      }
      sums[caller] = calls[0] + calls[1] + calls[2];
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_THAT(sums, Each(900));
}

TEST(ThreadPoolLifeTest, BadCountsAreNamed) {
  EXPECT_THAT([] { ThreadPool(0); }, ThrowsMessage<ArgumentError>(HasSubstr("threads is 0")));
  EXPECT_THAT([] { ThreadPool(-4); }, ThrowsMessage<ArgumentError>(HasSubstr("threads is -4")));
  EXPECT_THAT([] { ThreadPool(ThreadPool::kMaxThreads + 1); },
              ThrowsMessage<ArgumentError>(HasSubstr("threads is 4097")));
}

}  // namespace
}  // namespace treeline
