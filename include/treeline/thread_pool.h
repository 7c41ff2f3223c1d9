#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace treeline {

// A fixed set of threads that run one parallel region at a time. The caller is thread 0.
class ThreadPool {
 public:
  // Idle threads spin for `spin` before they sleep. Give zero where threads outnumber cores.
  // Throws ArgumentError unless 1 <= threads <= kMaxThreads.
  explicit ThreadPool(int threads, std::chrono::microseconds spin = kDefaultSpin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kMaxThreads = 4096;
  // Longer than what comes between two regions of one job: a thread that sleeps wakes late, above
  // all on a virtual machine, where that takes as long as much of a small region.
  static constexpr std::chrono::microseconds kDefaultSpin{1000};

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(thread) once on every thread and returns when all have returned. `body` must not
  // throw. Not reentrant, and not to be called from two threads at a time.
  void Run(const std::function<void(int thread)>& body);

 private:
  void Work(int thread);
  void StopWorkers();

  const std::chrono::microseconds spin_;
  const std::function<void(int)>* body_ = nullptr;
  std::atomic<std::uint32_t> region_{0};  // raised to start a region
  std::atomic<std::uint32_t> running_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace treeline
