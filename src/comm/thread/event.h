#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/spin.h"

namespace treeline {

using Clock = std::chrono::steady_clock;

// Lets one thread wait for changes that others make: spins first, then sleeps. Whoever changes
// something that the thread may wait for calls Notify afterwards; that takes no lock and no system
// call unless the thread sleeps.
class Event {
 public:
  void Notify() {
    changes_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) != 0) Wake();
  }

  // Returns true once ready() is true; false if it is not at the deadline.
  template <class Ready>
  bool Await(const Ready& ready, std::chrono::microseconds spin, Clock::time_point deadline) {
    constexpr int kChecksPerClockRead = 64;
    if (ready()) return true;
    const auto start = Clock::now();
    while (Clock::now() - start < spin) {
      for (int i = 0; i < kChecksPerClockRead; ++i) {
        if (ready()) return true;
        CpuRelax();
      }
    }
    for (;;) {
      const std::uint32_t seen = changes_.load(std::memory_order_seq_cst);
      if (ready()) return true;
      if (Clock::now() >= deadline) return false;
      // Either the notifier sees that this thread is asleep, or this thread sees the change.
      asleep_.store(1, std::memory_order_seq_cst);
      if (changes_.load(std::memory_order_seq_cst) == seen) Sleep(seen, deadline);
      asleep_.store(0, std::memory_order_seq_cst);
    }
  }

 private:
  // Until a change, a wake-up of any kind, or the deadline.
  void Sleep(std::uint32_t seen, Clock::time_point deadline);
  void Wake();

  alignas(64) std::atomic<std::uint32_t> changes_{0};
  std::atomic<std::uint32_t> asleep_{0};
};

}  // namespace treeline
