#include "treeline/memory.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace treeline {
namespace {

TEST(MemoryTrackerTest, CountsByPurpose) {
  MemoryTracker tracker;
  tracker.Add(Purpose::kShard, 100);
  tracker.Add(Purpose::kInFlight, 30);
  tracker.Add(Purpose::kShard, 5);
  EXPECT_EQ(tracker.held(Purpose::kShard), 105u);
  EXPECT_EQ(tracker.held(Purpose::kInFlight), 30u);
  EXPECT_EQ(tracker.held(Purpose::kWorkspace), 0u);
  EXPECT_EQ(tracker.held(Purpose::kResult), 0u);
  tracker.Remove(Purpose::kShard, 100);
  EXPECT_EQ(tracker.held(Purpose::kShard), 5u);
  EXPECT_EQ(tracker.peak(Purpose::kShard), 105u);
  EXPECT_EQ(tracker.peak(Purpose::kInFlight), 30u);
}

TEST(MemoryTrackerTest, PeakOfTheSumIsNotTheSumOfPeaks) {
  MemoryTracker tracker;
  tracker.Add(Purpose::kShard, 100);
  tracker.Remove(Purpose::kShard, 100);
  tracker.Add(Purpose::kResult, 60);
  EXPECT_EQ(tracker.peak(), 100u);
  tracker.Add(Purpose::kWorkspace, 50);
  EXPECT_EQ(tracker.peak(), 110u);
}

TEST(MemoryTrackerTest, PeaksRestartFromWhatIsHeld) {
  MemoryTracker tracker;
  tracker.Add(Purpose::kShard, 100);
  tracker.Add(Purpose::kResult, 40);
  tracker.Remove(Purpose::kShard, 70);
  tracker.ResetPeaks();
  EXPECT_EQ(tracker.peak(Purpose::kShard), 30u);
  EXPECT_EQ(tracker.peak(Purpose::kResult), 40u);
  EXPECT_EQ(tracker.peak(), 70u);
  tracker.Add(Purpose::kShard, 1);
  EXPECT_EQ(tracker.peak(Purpose::kShard), 31u);
  EXPECT_EQ(tracker.peak(), 71u);
}

TEST(MemoryTrackerTest, ThreadsLoseNoBytes) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 5000;
  MemoryTracker tracker;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&tracker] {
      for (int i = 0; i < kRounds; ++i) {
        tracker.Add(Purpose::kInFlight, 3);
        tracker.Add(Purpose::kInFlight, 4);
        tracker.Remove(Purpose::kInFlight, 6);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(tracker.held(Purpose::kInFlight), std::size_t{kThreads} * kRounds);
  // The last Add sees at least what is left in the end; no thread ever holds more than 6 besides.
  for (std::size_t peak : {tracker.peak(), tracker.peak(Purpose::kInFlight)}) {
    EXPECT_GE(peak, std::size_t{kThreads} * kRounds);
    EXPECT_LE(peak, std::size_t{kThreads} * (kRounds + 6));
  }
}

TEST(TrackedBufferTest, IsAlignedWritableAndCounted) {
  MemoryTracker tracker;
  for (std::size_t bytes :
       {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{100001}}) {
    {
      const TrackedBuffer buffer(bytes, Purpose::kWorkspace, &tracker);
      EXPECT_EQ(buffer.size(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0u);
      std::fill_n(buffer.data(), bytes, std::byte{7});
      EXPECT_EQ(tracker.held(Purpose::kWorkspace), bytes);
    }
    EXPECT_EQ(tracker.held(Purpose::kWorkspace), 0u);
    EXPECT_EQ(tracker.peak(Purpose::kWorkspace), bytes);
  }
}

TEST(TrackedBufferTest, NeedsNoTracker) {
  const TrackedBuffer buffer(10, Purpose::kResult, nullptr);
  buffer.data()[9] = std::byte{1};
  EXPECT_EQ(buffer.size(), 10u);
}

TEST(TrackedBufferTest, NoneAndZeroBytes) {
  const TrackedBuffer none;
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(none.size(), 0u);
  MemoryTracker tracker;
  const TrackedBuffer zero(0, Purpose::kShard, &tracker);
  EXPECT_EQ(zero.size(), 0u);
  EXPECT_EQ(tracker.held(Purpose::kShard), 0u);
}

TEST(TrackedBufferTest, MovingMovesTheCount) {
  MemoryTracker tracker;
  {
    TrackedBuffer first(100, Purpose::kShard, &tracker);
    std::byte* const data = first.data();
    TrackedBuffer second(std::move(first));
    EXPECT_EQ(second.data(), data);
    EXPECT_EQ(second.size(), 100u);
    EXPECT_EQ(tracker.held(Purpose::kShard), 100u);

    // What the target held is released, under its own purpose.
    second = TrackedBuffer(30, Purpose::kResult, &tracker);
    EXPECT_EQ(second.size(), 30u);
    EXPECT_EQ(tracker.held(Purpose::kShard), 0u);
    EXPECT_EQ(tracker.held(Purpose::kResult), 30u);
  }
  EXPECT_EQ(tracker.held(Purpose::kShard), 0u);
  EXPECT_EQ(tracker.held(Purpose::kResult), 0u);
  EXPECT_EQ(tracker.peak(), 130u);
}

// Small buffers are taken and given back many times a step.
TEST(TrackedBufferTest, AThreadMayHaveAgainWhatItGaveBack) {
  MemoryTracker tracker;
  const auto take = [&](std::size_t bytes) {
    return TrackedBuffer(bytes, Purpose::kWorkspace, &tracker);
  };
  for (int round = 0; round < 3; ++round) {
    std::vector<TrackedBuffer> buffers;  // more than are kept, of sizes that share pieces
    for (std::size_t i = 0; i < 40; ++i) {
      buffers.push_back(take(200 + 100 * i));
      std::fill_n(buffers.back().data(), buffers.back().size(), static_cast<std::byte>(i));
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const std::byte* data = buffers[i].data();
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0u);
      EXPECT_EQ(std::count(data, data + buffers[i].size(), static_cast<std::byte>(i)),
                static_cast<std::ptrdiff_t>(buffers[i].size()));
    }
    EXPECT_EQ(tracker.held(Purpose::kWorkspace), 40 * 200 + 100 * (39 * 40 / 2));
  }
  EXPECT_EQ(tracker.held(Purpose::kWorkspace), 0u);
  // A buffer may be given back by another thread, which may then end.
  TrackedBuffer moved = take(300);
  std::thread([buffer = std::move(moved)]() mutable { buffer = TrackedBuffer(); }).join();
  EXPECT_EQ(tracker.held(Purpose::kWorkspace), 0u);
  // Of the same size or one that takes as much memory: the largest that is kept, too.
  if (kSanitized) GTEST_SKIP() << "sanitizers see buffers that are never taken again";
  std::thread([&] {
    for (const auto& [first, second] : {std::pair{300, 300}, {300, 500}, {128 << 10, 100 << 10}}) {
      const auto* data = take(static_cast<std::size_t>(first)).data();
      EXPECT_EQ(take(static_cast<std::size_t>(second)).data(), data);
    }
  }).join();
}

// What a thread does last is to destroy what is its own, buffers and kept memory in any order.
TEST(TrackedBufferTest, MayOutliveWhatItsThreadKeeps) {
  static MemoryTracker tracker;
  std::thread([] {
    static thread_local TrackedBuffer last;
    last = TrackedBuffer();  // constructed before anything is kept, and so destroyed after it
    last = TrackedBuffer(300, Purpose::kWorkspace, &tracker);
    const TrackedBuffer kept(300, Purpose::kWorkspace, &tracker);
  }).join();
  EXPECT_EQ(tracker.held(Purpose::kWorkspace), 0u);
}

TEST(TrackedBufferTest, FailedAllocationIsNotCounted) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's allocator ends the program where it should throw";
  MemoryTracker tracker;
  EXPECT_THROW(TrackedBuffer(SIZE_MAX / 4, Purpose::kShard, &tracker), std::bad_alloc);
  EXPECT_EQ(tracker.held(Purpose::kShard), 0u);
  EXPECT_EQ(tracker.peak(), 0u);
}

}  // namespace
}  // namespace treeline
