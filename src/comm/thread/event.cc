#include "comm/thread/event.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#else
#include <algorithm>
#include <thread>
#endif

namespace treeline {

#if defined(__linux__)

// The only wait on an atomic with a deadline; std::atomic::wait has none.
void Event::Sleep(std::uint32_t seen, Clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
  if (left <= 0) return;
  constexpr std::int64_t kSecond = 1'000'000'000;
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(left / kSecond);
  time.tv_nsec = static_cast<long>(left % kSecond);
  syscall(SYS_futex, &changes_, FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
}

void Event::Wake() {
  syscall(SYS_futex, &changes_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

void Event::Sleep(std::uint32_t seen, Clock::time_point deadline) {
  constexpr std::chrono::microseconds kNap{50};
  while (changes_.load(std::memory_order_seq_cst) == seen && Clock::now() < deadline) {
    std::this_thread::sleep_for(kNap);
  }
}

void Event::Wake() {}

#endif

}  // namespace treeline
