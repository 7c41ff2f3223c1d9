// Ranks that are processes do what ranks that are threads do: the same bytes, messages, rounds and
// bits.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "cli/rank_check.h"
#include "cli/ranks.h"
#include "sanitized.h"

namespace treeline::cli {
namespace {

RankSetup SetupOf(LayoutKind layout, bool in_process) {
  return {.layout = layout, .ranks = {.ranks = Processes()->size()}, .in_process = in_process};
}

ProblemShape Shape(std::int64_t queries, std::int64_t tokens) {
  ProblemShape shape;
  shape.spec = AttentionSpec::Make(6, 3, 64);
  shape.spec.causal = true;
  shape.spec.sinks = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, 0.25f};
  shape.seed = 11;
  for (const std::int64_t keys : {tokens, std::int64_t{7}}) {
    const std::int64_t rows = std::min(queries, keys);
    shape.sequences.push_back(
        {Positions::Contiguous(keys - rows, rows), Positions::Contiguous(0, keys)});
  }
  return shape;
}

void ExpectSame(const RankReport& processes, const RankReport& threads) {
  ASSERT_EQ(processes.counters.size(), threads.counters.size());
  for (std::size_t r = 0; r < threads.counters.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "rank " << r);
    EXPECT_EQ(processes.counters[r].bytes, threads.counters[r].bytes);
    EXPECT_EQ(processes.counters[r].messages, threads.counters[r].messages);
    EXPECT_EQ(processes.counters[r].rounds, threads.counters[r].rounds);
    EXPECT_EQ(processes.pairs[r], threads.pairs[r]);
    EXPECT_EQ(processes.peak_bytes[r], threads.peak_bytes[r]);
  }
  EXPECT_EQ(processes.bits, threads.bits);
  EXPECT_EQ(processes.max_error, threads.max_error);
  EXPECT_EQ(processes.same_bits, threads.same_bits);
}

constexpr LayoutKind kLayouts[] = {LayoutKind::kContiguous, LayoutKind::kStriped,
                                   LayoutKind::kZigzag};

// Some messages are packed behind their header, and some are too large for that.
std::vector<std::int64_t> Tokens() {
  if (kSanitized) return {5, 701};
  return {5, 301, 2003};
}

TEST(ProcessTest, DecodesAsThreadsDo) {
  for (const std::int64_t tokens : Tokens()) {
    RankProblem problem(Shape(2, tokens));
    for (const LayoutKind layout : kLayouts) {
      for (const Schedule schedule : kDecodeSchedules) {
        for (const int node_size : {0, 2}) {
          SCOPED_TRACE(testing::Message() << tokens << " tokens, " << Name(layout) << ", "
                                          << Name(schedule) << ", nodes of " << node_size);
          const DecodeOptions options{.schedule = schedule, .node_size = node_size};
          ExpectSame(problem.Decode(SetupOf(layout, false), options),
                     problem.Decode(SetupOf(layout, true), options));
        }
      }
    }
  }
}

TEST(ProcessTest, PrefillsAsThreadsDo) {
  for (const std::int64_t tokens : Tokens()) {
    RankProblem problem(Shape(tokens, tokens));
    for (const LayoutKind layout : kLayouts) {
      for (const Schedule schedule : {Schedule::kRingKv, Schedule::kRingQ}) {
        SCOPED_TRACE(testing::Message()
                     << tokens << " tokens, " << Name(layout) << ", " << Name(schedule));
        ExpectSame(problem.Prefill(SetupOf(layout, false), schedule),
                   problem.Prefill(SetupOf(layout, true), schedule));
      }
    }
  }
}

TEST(ProcessTest, ComputesGradientsAsThreadsDo) {
  RankProblem problem(Shape(301, 301));
  for (const LayoutKind layout : kLayouts) {
    SCOPED_TRACE(testing::Message() << Name(layout));
    ExpectSame(problem.Backward(SetupOf(layout, false)), problem.Backward(SetupOf(layout, true)));
  }
}

// Nobody waits: what a rank calls while it computes must be enough for large messages to arrive.
TEST(ProcessTest, MessagesMoveByProgressAlone) {
  Communicator& comm = *Processes();
  if (comm.size() == 1) return;
  constexpr std::size_t kBytes = std::size_t{8} << 20;
  const std::vector<std::byte> out(kBytes, std::byte{7});
  std::vector<std::byte> in(kBytes);
  const ConstBytes piece = out;
  const auto transfer = comm.Start({.send = {&piece, 1},
                                    .to = (comm.rank() + 1) % comm.size(),
                                    .receive = in,
                                    .from = (comm.rank() + comm.size() - 1) % comm.size()});
  const auto has_come = [&] {
    const volatile std::byte* bytes = in.data();
    for (std::size_t i = 0; i < kBytes; i += 4096) {
      if (bytes[i] != std::byte{7}) return false;
    }
    return bytes[kBytes - 1] == std::byte{7};
  };
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!has_come() && std::chrono::steady_clock::now() < until) {
    EXPECT_FALSE(comm.Progress());
    std::this_thread::yield();
  }
  EXPECT_TRUE(has_come());
  // Others may still need this rank: a message that it sent is on its way until they have it.
  transfer->Wait();
}

// One device, threads and processes.
TEST(ProcessTest, ReproducibleDecodingHasTheSameBits) {
  const int n = Processes()->size();
  if (64 % n != 0) return;  // such a number of ranks is refused; see reproducible_test.cc
  for (const std::int64_t tokens : {1, 63, 777, 5000}) {
    RankProblem problem(Shape(1, tokens));
    RankSetup one = SetupOf(LayoutKind::kStriped, true);
    one.ranks.ranks = 1;
    for (const Schedule schedule : {Schedule::kTree, Schedule::kGather}) {
      const DecodeOptions options{.schedule = schedule, .reproducible = true};
      const RankReport alone = problem.Decode(one, options);
      EXPECT_EQ(problem.Decode(SetupOf(LayoutKind::kStriped, true), options).bits, alone.bits);
      EXPECT_EQ(problem.Decode(SetupOf(LayoutKind::kStriped, false), options).bits, alone.bits);
    }
  }
}

}  // namespace
}  // namespace treeline::cli
