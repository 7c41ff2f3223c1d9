#include "treeline/thread_pool.h"

#include "core/check.h"
#include "core/spin.h"

namespace treeline {
namespace {

// Waits until value != old: spins first, then sleeps. Returns the new value.
std::uint32_t WaitWhile(const std::atomic<std::uint32_t>& value, std::uint32_t old,
                        std::chrono::microseconds spin) {
  constexpr int kChecksPerClockRead = 64;
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kChecksPerClockRead; ++i) {
      const std::uint32_t now = value.load(std::memory_order_acquire);
      if (now != old) return now;
      CpuRelax();
    }
  } while (std::chrono::steady_clock::now() - start < spin);
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::chrono::microseconds spin) : spin_(spin) {
  Require(threads >= 1 && threads <= kMaxThreads, "threads is ", threads, "; it must be from 1 to ",
          kMaxThreads);
  workers_.reserve(static_cast<std::size_t>(threads) - 1);
  try {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { Work(t); });
  } catch (...) {  // the system gave fewer threads: those that run must end before the throw
    StopWorkers();
    throw;
  }
}

ThreadPool::~ThreadPool() { StopWorkers(); }

void ThreadPool::StopWorkers() {
  stop_.store(true, std::memory_order_relaxed);
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(const std::function<void(int)>& body) {
  if (workers_.empty()) {
    body(0);
    return;
  }
  body_ = &body;
  running_.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  body(0);
  for (std::uint32_t left = running_.load(std::memory_order_acquire); left != 0;) {
    left = WaitWhile(running_, left, spin_);
  }
}

void ThreadPool::Work(int thread) {
  std::uint32_t region = 0;
  for (;;) {
    // Regions never overlap, so none can be missed between two loads.
    region = WaitWhile(region_, region, spin_);
    if (stop_.load(std::memory_order_relaxed)) return;
    (*body_)(thread);
    if (running_.fetch_sub(1, std::memory_order_release) == 1) running_.notify_one();
  }
}

}  // namespace treeline
