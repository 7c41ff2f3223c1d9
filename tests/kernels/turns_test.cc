#include "kernels/cpu/turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace treeline::cpu {
namespace {

using namespace std::chrono_literals;

// Items take the steps as the backward kernel does: those of a group share rows, the first of a
// group has no predecessor, and steps may be skipped. Some groups at a time take turns to have an
// item.
struct Work {
  int threads;
  std::uint32_t items;
  std::uint32_t items_per_group;
  std::uint32_t groups_at_a_time = 1;
  std::uint32_t steps;
  std::function<bool(std::uint32_t item, std::uint32_t step)> skips;

  std::uint32_t GroupOf(std::uint32_t item) const {
    return item / (items_per_group * groups_at_a_time) * groups_at_a_time + item % groups_at_a_time;
  }
  bool IsFirst(std::uint32_t item) const { return item / groups_at_a_time % items_per_group == 0; }
  // Items by the steps that they take: [group, step].
  std::vector<std::vector<std::uint32_t>> Nobody() const {
    return std::vector<std::vector<std::uint32_t>>((GroupOf(items - 1) + groups_at_a_time) * steps);
  }
};

// The items that took each step, in the order in which they did: [group, step]. Nothing but the
// turns orders the additions to these vectors.
std::vector<std::vector<std::uint32_t>> RunInTurns(const Work& work) {
  auto passed = work.Nobody();
  for (auto& items : passed) items.reserve(work.items_per_group);
  Turns turns(work.threads);
  std::atomic<std::uint32_t> next{0};
  const auto run = [&] {
    for (;;) {
      const std::uint32_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= work.items) return;
      const bool first = work.IsFirst(item);
      const std::uint32_t predecessor = item - work.groups_at_a_time;
      turns.Begin(item);
      for (std::uint32_t step = 0; step < work.steps; ++step) {
        if (work.skips(item, step)) continue;
        if (!first) turns.AwaitPredecessor(predecessor, step);
        passed[work.GroupOf(item) * work.steps + step].push_back(item);
        turns.Pass(item, step);
      }
      if (!first) turns.AwaitPredecessor(predecessor, Turns::kEnded - 1);
      turns.End(item);
    }
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < work.threads; ++t) threads.emplace_back(run);
  run();
  for (std::thread& thread : threads) thread.join();
  return passed;
}

void ExpectInOrder(const Work& work) {
  auto expected = work.Nobody();
  for (std::uint32_t item = 0; item < work.items; ++item) {
    for (std::uint32_t step = 0; step < work.steps; ++step) {
      if (!work.skips(item, step)) {
        expected[work.GroupOf(item) * work.steps + step].push_back(item);
      }
    }
  }
  EXPECT_EQ(RunInTurns(work), expected);
}

// A hash, so that skipped steps have no pattern.
std::uint32_t Mix(std::uint32_t item, std::uint32_t step) {
  std::uint32_t x = item * 2654435761u + step * 40503u;
  x ^= x >> 15;
  x *= 2246822519u;
  return x ^ (x >> 13);
}

class TurnsTest : public ::testing::TestWithParam<int> {};

TEST_P(TurnsTest, EveryStepIsTakenInTheOrderOfItems) {
  ExpectInOrder({.threads = GetParam(),
                 .items = 5000,
                 .items_per_group = 5000,
                 .steps = 3,
                 .skips = [](std::uint32_t, std::uint32_t) { return false; }});
}

TEST_P(TurnsTest, SkippedStepsDoNotBreakTheOrder) {
  for (std::uint32_t kept : {1u, 4u, 7u}) {  // of 8
    ExpectInOrder({.threads = GetParam(),
                   .items = 2000,
                   .items_per_group = 2000,
                   .steps = 5,
                   .skips = [kept](std::uint32_t item, std::uint32_t step) {
                     return Mix(item, step) % 8 >= kept;
                   }});
  }
}

// As under causality: later items have only later steps.
TEST_P(TurnsTest, ItemsMayStartLate) {
  ExpectInOrder({.threads = GetParam(),
                 .items = 600,
                 .items_per_group = 20,
                 .steps = 20,
                 .skips = [](std::uint32_t item, std::uint32_t step) { return step < item % 20; }});
}

TEST_P(TurnsTest, ItemsMayTakeNoStepAtAll) {
  ExpectInOrder({.threads = GetParam(),
                 .items = 3000,
                 .items_per_group = 1000,
                 .steps = 2,
                 .skips = [](std::uint32_t item, std::uint32_t) { return item % 5 != 0; }});
}

TEST_P(TurnsTest, GroupsAreIndependent) {
  for (std::uint32_t per_group : {1u, 2u, 3u, 17u}) {
    ExpectInOrder(
        {.threads = GetParam(),
         .items = 2000,
         .items_per_group = per_group,
         .steps = 2,
         .skips = [](std::uint32_t item, std::uint32_t step) { return Mix(item, step) % 3 == 0; }});
  }
}

// As heads do: more of them than slots, and fewer.
TEST_P(TurnsTest, GroupsMayTakeTurns) {
  for (std::uint32_t groups : {2u, 8u, 100u}) {
    ExpectInOrder(
        {.threads = GetParam(),
         .items = 2000,
         .items_per_group = 13,
         .groups_at_a_time = groups,
         .steps = 3,
         .skips = [](std::uint32_t item, std::uint32_t step) { return Mix(item, step) % 3 == 0; }});
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, TurnsTest, ::testing::Values(1, 2, 3, 4, 16));

// Whether `wait` is still blocked after some time, and ends once `release` was called.
void ExpectBlocksUntil(const std::function<void()>& wait, const std::function<void()>& release) {
  std::atomic<bool> returned{false};
  std::thread waiter([&] {
    wait();
    returned = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(returned);
  release();
  waiter.join();
}

TEST(TurnsWaitTest, StepWaitsForThePredecessorsSameStep) {
  Turns turns(2);
  turns.Begin(0);
  turns.Begin(1);
  turns.Pass(0, 0);
  turns.AwaitPredecessor(0, 0);
  ExpectBlocksUntil([&] { turns.AwaitPredecessor(0, 1); }, [&] { turns.Pass(0, 1); });
  ExpectBlocksUntil([&] { turns.AwaitPredecessor(0, 2); }, [&] { turns.End(0); });
}

TEST(TurnsWaitTest, ALaterStepOrTheEndImpliesTheEarlierOnes) {
  Turns turns(2);
  turns.Begin(0);
  turns.Begin(1);
  turns.Pass(0, 7);
  for (std::uint32_t step = 0; step <= 7; ++step) turns.AwaitPredecessor(0, step);
  turns.End(0);
  turns.AwaitPredecessor(0, 1000000);
  turns.AwaitPredecessor(0, Turns::kEnded - 1);
}

TEST(TurnsWaitTest, StepWaitsForAPredecessorThatHasNotBegun) {
  Turns turns(1);
  const auto slots = static_cast<std::uint32_t>(turns.bytes() / sizeof(std::uint64_t));
  // Its slot holds the end of an older item, which must not be taken for its own.
  for (std::uint32_t item = 0; item < slots; ++item) {
    turns.Begin(item);
    turns.End(item);
  }
  ExpectBlocksUntil([&] { turns.AwaitPredecessor(slots, 0); },
                    [&] {
                      turns.Begin(slots);
                      turns.Pass(slots, 0);
                    });
}

TEST(TurnsWaitTest, BeginWaitsForTheSlot) {
  Turns turns(1);
  const auto slots = static_cast<std::uint32_t>(turns.bytes() / sizeof(std::uint64_t));
  for (std::uint32_t item = 0; item < slots; ++item) turns.Begin(item);
  ExpectBlocksUntil([&] { turns.Begin(slots); }, [&] { turns.End(0); });
  // Item 0 is long ended: its slot now says so by a later item's number.
  turns.AwaitPredecessor(0, Turns::kEnded - 1);
}

TEST(TurnsWaitTest, MemoryGrowsWithThreadsOnly) {
  for (int threads : {1, 2, 3, 64, 4096}) {
    const std::size_t bytes = Turns(threads).bytes();
    EXPECT_GE(bytes, static_cast<std::size_t>(threads) * sizeof(std::uint64_t));
    EXPECT_LE(bytes, static_cast<std::size_t>(threads) * 8 * sizeof(std::uint64_t));
  }
}

}  // namespace
}  // namespace treeline::cpu
