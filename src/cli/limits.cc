#include "cli/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "backend/cpu/parallel.h"
#include "kernels/cpu/bf16/product.h"
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

double Bf16Peak(const Context& context) {
  using cpu::bf16::kDepth;
  using cpu::bf16::kSide;
  using cpu::bf16::kTileSize;
  const cpu::bf16::Multiplier* multiplier = cpu::TableFor(context).multiplier;
  if (multiplier == nullptr) return 0.0;
  constexpr int kSteps = 4;      // both sides and the sums fit into 32 KB
  constexpr int kProducts = 16;  // between looks at the clock
  constexpr double kOperations = 2.0 * kSide * kSide * kDepth * kSteps * kProducts;
  std::vector<double> rates(static_cast<std::size_t>(cpu::Threads(context)));
  OnAllThreads(context, [&](int thread) {
    alignas(64) std::uint16_t a[kSteps * kSide * kDepth];
    alignas(64) std::uint16_t b[kSteps * 2 * kTileSize];
    std::fill(std::begin(a), std::end(a), std::uint16_t{0x3F80});  // ones: zeros may be faster
    std::fill(std::begin(b), std::end(b), std::uint16_t{0x3F80});
    alignas(64) float c[kSide * kSide] = {};
    const auto multiply = [&] {
      for (int i = 0; i < kProducts; ++i) {
        multiplier->multiply({.a = a,
                              .a_row = kDepth,
                              .a_step = std::int64_t{kSide} * kDepth,
                              .b = b,
                              .b_column = kTileSize,
                              .b_step = std::int64_t{2} * kTileSize,
                              .steps = kSteps,
                              .c = c,
                              .c_row = kSide,
                              .add = true});
      }
    };
    constexpr double kSeconds = 5e-3;
    double seconds = 0.0;
    int rounds = 0;
    multiplier->begin();
    for (; seconds < kSeconds; ++rounds) seconds += TimeOnce(multiply);
    multiplier->end();
    rates[static_cast<std::size_t>(thread)] = kOperations * rounds / seconds;
  });
  double total = 0.0;
  for (double rate : rates) total += rate;
  return total;
}

}  // namespace treeline::cli
