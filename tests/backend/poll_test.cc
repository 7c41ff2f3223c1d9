#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "backend/cpu/parallel.h"

namespace treeline {
namespace {

// Counts calls, and says stop from a given one on.
struct Counter {
  int calls = 0;
  int stop_at = 1 << 30;
  std::thread::id thread = {};

  static bool Call(void* argument) {
    auto& counter = *static_cast<Counter*>(argument);
    counter.thread = std::this_thread::get_id();
    return ++counter.calls >= counter.stop_at;
  }
};

TEST(PollTest, IsCalledBeforeEveryPieceOfASingleThread) {
  Counter counter;
  std::vector<std::int64_t> items;
  cpu::ForEach({.poll = {Counter::Call, &counter}}, 5,
               [&](std::int64_t item, int) { items.push_back(item); });
  EXPECT_EQ(counter.calls, 5);
  EXPECT_EQ(items, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(PollTest, StopsBeforeTheNextPiece) {
  Counter counter{.stop_at = 3};
  std::vector<std::int64_t> items;
  cpu::ForEach({.poll = {Counter::Call, &counter}}, 100,
               [&](std::int64_t item, int) { items.push_back(item); });
  EXPECT_EQ(items, (std::vector<std::int64_t>{0, 1}));
}

TEST(PollTest, IsCalledByTheCallerAloneAndStopsAllThreads) {
  ThreadPool pool(3);
  Counter counter{.stop_at = 2};
  std::atomic<std::int64_t> done{0};
  constexpr std::int64_t kItems = 1'000'000'000;  // would take minutes
  cpu::ForEach({.pool = &pool, .poll = {Counter::Call, &counter}}, kItems,
               [&](std::int64_t, int) { done.fetch_add(1); });
  EXPECT_EQ(counter.thread, std::this_thread::get_id());
  EXPECT_GE(done.load(), 1);
  EXPECT_LT(done.load(), kItems);
}

}  // namespace
}  // namespace treeline
