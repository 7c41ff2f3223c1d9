#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <thread>

#include "core/spin.h"

namespace treeline::cpu {

// Orders the additions of concurrent items to shared rows: item i may pass step s only after its
// predecessor, some item before it, has. Then sums come out the same for every number of threads.
// Items must be begun in the order of their numbers, so that the lowest unfinished one never waits.
// The memory does not grow with the number of items: a slot is reused when its item has ended.
class Turns {
 public:
  static constexpr std::uint32_t kEnded = 0xFFFFFFFF;

  explicit Turns(int threads)
      : slots_(std::bit_ceil(static_cast<std::uint32_t>(threads) * 4)),
        states_(std::make_unique<std::atomic<std::uint64_t>[]>(slots_)) {
    // As if an item one round earlier had ended in each slot.
    for (std::uint32_t i = 0; i < slots_; ++i) states_[i] = Pack(Tag(i) - 1, kEnded);
  }

  // Waits for a slot.
  void Begin(std::uint32_t item) {
    Await(item, Pack(Tag(item) - 1, kEnded));
    Slot(item).store(Pack(Tag(item), 0), std::memory_order_release);
  }
  // Waits until an item that was begun before has passed `step`.
  void AwaitPredecessor(std::uint32_t predecessor, std::uint32_t step) {
    Await(predecessor, Pack(Tag(predecessor), step + 1));
  }
  void Pass(std::uint32_t item, std::uint32_t step) {
    Slot(item).store(Pack(Tag(item), step + 1), std::memory_order_release);
  }
  void End(std::uint32_t item) {
    Slot(item).store(Pack(Tag(item), kEnded), std::memory_order_release);
  }

  std::size_t bytes() const { return slots_ * sizeof(states_[0]); }

 private:
  // Which use of its slot an item is, from 1: states grow with time, so that one comparison tells
  // both "further on" and "long ended".
  std::uint32_t Tag(std::uint32_t item) const { return item / slots_ + 1; }
  static std::uint64_t Pack(std::uint32_t tag, std::uint32_t progress) {
    return (static_cast<std::uint64_t>(tag) << 32) | progress;
  }
  std::atomic<std::uint64_t>& Slot(std::uint32_t item) { return states_[item % slots_]; }

  void Await(std::uint32_t item, std::uint64_t state) {
    constexpr int kSpins = 1000;
    for (int spins = 0; Slot(item).load(std::memory_order_acquire) < state; ++spins) {
      if (spins < kSpins) {
        CpuRelax();
      } else {
        std::this_thread::yield();  // threads may outnumber cores
      }
    }
  }

  const std::uint32_t slots_;
  const std::unique_ptr<std::atomic<std::uint64_t>[]> states_;
};

}  // namespace treeline::cpu
