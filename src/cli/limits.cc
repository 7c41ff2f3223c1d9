#include "cli/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "backend/cpu/parallel.h"
#include "kernels/cpu/kernel_table.h"

namespace treeline::cli {
namespace {

void OnAllThreads(const Context& context, const std::function<void(int)>& body) {
  if (context.pool == nullptr) {
    body(0);
  } else {
    context.pool->Run(body);
  }
}

}  // namespace

double TimeOnce(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double ReadBandwidth(const Context& context, const std::byte* data, std::size_t bytes) {
  const cpu::KernelTable& table = cpu::TableFor(context);
  const auto threads = static_cast<std::size_t>(cpu::Threads(context));
  const std::size_t share = bytes / threads / 4096 * 4096;
  std::atomic<std::uint64_t> checksum{0};
  const double seconds = TimeOnce([&] {
    OnAllThreads(context, [&](int thread) {
      checksum += table.read_probe({.data = data + share * static_cast<std::size_t>(thread),
                                    .bytes = share,
                                    .iterations = 0});
    });
  });
  return static_cast<double>(share * threads) / seconds;
}

double FmaPeak(const Context& context) {
  constexpr std::size_t kIterations = 2'000'000;
  const cpu::KernelTable& table = cpu::TableFor(context);
  std::vector<double> operations(static_cast<std::size_t>(cpu::Threads(context)));
  const double seconds = TimeOnce([&] {
    OnAllThreads(context, [&](int thread) {
      operations[static_cast<std::size_t>(thread)] =
          table.fma_probe({.data = nullptr, .bytes = 0, .iterations = kIterations});
    });
  });
  double total = 0.0;
  for (double n : operations) total += n;
  return total / seconds;
}

}  // namespace treeline::cli
