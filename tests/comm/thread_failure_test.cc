// A rank that throws, does not come, asks for something else or drops a transfer: nobody waits for
// ever, everybody learns why, and no buffer is touched that its owner has taken back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <regex>
#include <thread>

#include "comm/rank_outcomes.h"

namespace treeline::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = RankOutcome::Kind;

// All ranks but `failing` ended with `what`, and long before the timeout.
void ExpectOthersFailed(const Outcomes& outcomes, int failing, const std::string& what) {
  for (int rank = 0; rank < static_cast<int>(outcomes.ranks.size()); ++rank) {
    EXPECT_LT(outcomes[rank].after, kAtOnce);
    if (rank == failing) continue;
    EXPECT_EQ(outcomes[rank].kind, Kind::kCommError) << rank;
    EXPECT_EQ(outcomes[rank].what, what) << rank;
  }
}

// Each rank waits in another way for a rank that throws instead: for its message, for it to take
// one, for both, for a rank that waits itself; the last one only comes later.
void WaitFor(Communicator& comm, int failing, const std::function<void()>& fail) {
  const int n = comm.size();
  std::byte in{0};
  const std::byte out{0};
  if (comm.rank() == failing) {
    std::this_thread::sleep_for(std::chrono::milliseconds(failing));
    fail();
  }
  switch ((comm.rank() + n - failing) % n) {
    case 1:
      return comm.Exchange({}, kNoRank, {&in, 1}, failing);
    case 2:
      return comm.Exchange({&out, 1}, failing, {}, kNoRank);
    case 3:
      return comm.Exchange({&out, 1}, failing, {&in, 1}, failing);
    case 4:
      return comm.Exchange({}, kNoRank, {&in, 1}, (failing + 1) % n);
    default:
      std::this_thread::sleep_for(30ms);
      return comm.Exchange({&out, 1}, failing, {}, kNoRank);
  }
}

class ThrowTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rank, ThrowTest, testing::Values(0, 1, 5),
                         testing::PrintToStringParamName());

TEST_P(ThrowTest, RuntimeErrorEndsAllAndIsThrownAgain) {
  const Outcomes outcomes = RunAndRecord({.ranks = 6, .timeout = kLong}, [](Communicator& comm) {
    WaitFor(comm, GetParam(), [] { throw std::runtime_error("out of paper"); });
  });
  ExpectOthersFailed(outcomes, GetParam(),
                     "rank " + std::to_string(GetParam()) + " failed: out of paper");
  ExpectThrown<std::runtime_error>(outcomes, "out of paper");
  ExpectNewGroupWorks(6);
}

TEST_P(ThrowTest, ArgumentErrorKeepsItsType) {
  const Outcomes outcomes = RunAndRecord({.ranks = 6, .timeout = kLong}, [](Communicator& comm) {
    WaitFor(comm, GetParam(), [] { throw ArgumentError("heads is -1"); });
  });
  ExpectOthersFailed(outcomes, GetParam(),
                     "rank " + std::to_string(GetParam()) + " failed: heads is -1");
  ExpectThrown<ArgumentError>(outcomes, "heads is -1");
  ExpectNewGroupWorks(6);
}

TEST_P(ThrowTest, WhatIsNoStdExceptionIsThrownAgainToo) {
  const Outcomes outcomes = RunAndRecord({.ranks = 6, .timeout = kLong}, [](Communicator& comm) {
    WaitFor(comm, GetParam(), [] { throw 42; });
  });
  ExpectOthersFailed(outcomes, GetParam(),
                     "rank " + std::to_string(GetParam()) + " failed: an unknown exception");
  ASSERT_TRUE(outcomes.thrown);
  try {
    std::rethrow_exception(outcomes.thrown);
  } catch (int value) {
    EXPECT_EQ(value, 42);
  } catch (...) {
    ADD_FAILURE() << "not an int";
  }
  ExpectNewGroupWorks(6);
}

TEST(AbortTest, TheFirstReasonIsKept) {
  ThreadGroup group({.ranks = 2, .timeout = kLong});
  group.rank(1).Abort("first");
  group.rank(0).Abort("second");
  EXPECT_EQ(group.failed_rank(), 1);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT([&] { group.rank(rank).Start({.to = 1 - rank}); },
                testing::ThrowsMessage<CommError>("rank 1 failed: first"));
  }
}

// A rank that catches what it caused leaves nothing to throw again.
TEST(AbortTest, RunRanksThrowsWhatIsLeftIfTheFirstRankCaughtItsOwn) {
  std::byte value{0};
  const auto first_returns = [&](Communicator& comm) {
    if (comm.rank() == 1) return comm.Abort("enough");
    std::byte in{0};
    comm.Exchange({}, kNoRank, {&in, 1}, 1);
  };
  const Outcomes outcomes = RunAndRecord({.ranks = 3, .timeout = kLong}, first_returns);
  EXPECT_EQ(outcomes[1].kind, Kind::kReturned);
  ExpectOthersFailed(outcomes, 1, "rank 1 failed: enough");
  ExpectThrown<CommError>(outcomes, "rank 1 failed: enough");
  RunRanks({.ranks = 3, .timeout = kLong}, [&](Communicator& comm) {
    EXPECT_THROW(
        {
          first_returns(comm);
          comm.Exchange({&value, 1}, (comm.rank() + 1) % 3, {}, kNoRank);
        },
        CommError);
  });
  ExpectNewGroupWorks(3);
}

class TimeoutTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Milliseconds, TimeoutTest, testing::Values(1, 50),
                         testing::PrintToStringParamName());

// The one rank that does not come is named, and so is the one that found out.
TEST_P(TimeoutTest, ARankThatNeverComesIsNamedToAllThatWait) {
  constexpr int kAbsent = 3;
  const std::chrono::milliseconds timeout{GetParam()};
  const Outcomes outcomes = RunAndRecord({.ranks = 4, .timeout = timeout}, [](Communicator& comm) {
    if (comm.rank() == kAbsent) return;
    comm.SetStep("meeting", 1);
    const std::byte out{0};
    std::byte in{0};
    if (comm.rank() == 0) comm.Exchange({&out, 1}, kAbsent, {}, kNoRank);
    if (comm.rank() == 1) comm.Exchange({}, kNoRank, {&in, 1}, kAbsent);
    if (comm.rank() == 2) comm.Exchange({&out, 1}, kAbsent, {&in, 1}, kAbsent);
  });
  EXPECT_EQ(outcomes[kAbsent].kind, Kind::kReturned);
  const std::string& what = outcomes[0].what;
  std::smatch match;
  const std::regex expected(
      R"(rank ([0-2]) failed: it waited (0\.\d+) s for rank 3 in step meeting)");
  ASSERT_TRUE(std::regex_match(what, match, expected)) << what;
  EXPECT_EQ(std::stod(match[2]), GetParam() / 1e3);
  EXPECT_GE(outcomes[std::stoi(match[1])].after, timeout);
  ExpectOthersFailed(outcomes, kAbsent, what);
  ExpectThrown<CommError>(outcomes, what);
  ExpectNewGroupWorks(4);
}

TEST_P(TimeoutTest, ARankThatComesTooLateLearnsIt) {
  std::atomic<bool> over{false};
  const Outcomes outcomes = RunAndRecord(
      {.ranks = 2, .timeout = std::chrono::milliseconds(GetParam())}, [&](Communicator& comm) {
        while (comm.rank() == 1 && !over) std::this_thread::sleep_for(1ms);
        Inbox in(8);
        try {
          comm.Exchange({}, kNoRank, in.bytes(), 1 - comm.rank());
        } catch (...) {
          over = true;
          throw;
        }
      });
  ExpectOthersFailed(outcomes, kNoRank, outcomes[0].what);
  EXPECT_THAT(outcomes[0].what, AllOf(HasSubstr("rank 0 failed"), HasSubstr("rank 1")));
}

// Ranks 2 and 3 have no part in it.
void ExpectMismatch(const std::function<void(Communicator&)>& meet, const std::string& says) {
  const Outcomes outcomes = RunAndRecord({.ranks = 4, .timeout = kLong}, [&](Communicator& comm) {
    if (comm.rank() < 2) return meet(comm);
    std::byte in{0};
    comm.Exchange({}, kNoRank, {&in, 1}, 5 - comm.rank());
  });
  ExpectOthersFailed(outcomes, kNoRank, outcomes[3].what);
  EXPECT_THAT(outcomes[3].what, HasSubstr(says));
  ExpectThrown<CommError>(outcomes, outcomes[3].what);
  ExpectNewGroupWorks(4);
}

TEST(MismatchTest, SizesThatDifferAreAnErrorOnEveryRank) {
  for (const std::size_t expected : {0, 2, 4}) {
    Inbox in(expected);
    ExpectMismatch(
        [&](Communicator& comm) {
          comm.SetStep(comm.rank() == 0 ? "giving" : "taking", 5);
          if (comm.rank() == 0) comm.Exchange(Payload(0, 1, 0, 3), 1, {}, kNoRank);
          if (comm.rank() == 1) comm.Start({.receive = in.bytes(), .from = 0})->Wait();
        },
        "rank 0 sends 3 bytes in step giving, rank 1 expects " + std::to_string(expected) +
            " in step taking");
    EXPECT_TRUE(in.Untouched());
  }
}

TEST(MismatchTest, SignaturesThatDifferAreAnErrorOnEveryRank) {
  for (const std::size_t bytes : {0, 3}) {
    Inbox in(bytes);
    ExpectMismatch(
        [&](Communicator& comm) {
          comm.SetStep("decode", comm.rank() == 0 ? 5 : 6);
          if (comm.rank() == 0) comm.Exchange(Payload(0, 1, 0, bytes), 1, {}, kNoRank);
          if (comm.rank() == 1) comm.Start({.receive = in.bytes(), .from = 0})->Wait();
        },
        "different shapes or options");
    EXPECT_TRUE(in.Untouched());
  }
}

// The peer comes after the transfer is gone: it gets an error, and nobody gets bytes.
TEST(DroppedTransferTest, BuffersAreNotTouchedAfterwards) {
  for (const int dropping : {0, 1}) {
    std::atomic<bool> dropped{false};
    std::vector<std::byte> out = Payload(0, 1, 0, 64);
    Inbox in(64);
    const ConstBytes piece = out;
    const Outcomes outcomes = RunAndRecord({.ranks = 2, .timeout = 50ms}, [&](Communicator& comm) {
      const Message message = comm.rank() == 0 ? Message{.send = {&piece, 1}, .to = 1}
                                               : Message{.receive = in.bytes(), .from = 0};
      if (comm.rank() == dropping) {
        comm.Start(message).reset();
        if (dropping == 0) std::fill(out.begin(), out.end(), std::byte{0xEE});
        dropped = true;
      } else {
        while (!dropped) std::this_thread::yield();
        comm.Start(message)->Wait();
      }
    });
    EXPECT_EQ(outcomes[dropping].kind, Kind::kReturned);
    EXPECT_EQ(outcomes[1 - dropping].kind, Kind::kCommError);
    EXPECT_TRUE(in.Untouched());
    ExpectNewGroupWorks(2);
  }
}

// Rank 0 drops a large transfer, by hand or by throwing, while rank 1 is likely to copy. Afterwards
// the memory is rank 0's again: it writes to it, or frees it.
TEST(DroppedTransferTest, APeerThatIsCopyingIsWaitedFor) {
  constexpr std::size_t kLarge = std::size_t{4} << 20;
  constexpr std::byte kOld{1};
  constexpr std::byte kNew{2};
  constexpr std::byte kOverwritten{3};
  const auto all_are = [](const std::vector<std::byte>& bytes, std::byte value) {
    return std::all_of(bytes.begin(), bytes.end(), [&](std::byte b) { return b == value; });
  };
  int arrived = 0;
  std::minstd_rand random(5);
  for (int repetition = 0; repetition < 160; ++repetition) {
    const bool sends = repetition % 2 == 0;
    const bool throws = repetition / 2 % 2 == 0;
    // Mostly about as long as the copy takes; now and then longer, on any machine.
    const auto delay = repetition % 16 < 4 ? 100ms : std::chrono::microseconds(random() % 1600);
    std::atomic<bool> started{false};
    std::atomic<bool> copying{false};
    std::atomic<bool> started_too{false};
    const Outcomes outcomes = RunAndRecord({.ranks = 2, .timeout = kLong}, [&](Communicator& comm) {
      const int other = 1 - comm.rank();
      const bool sender = (comm.rank() == 0) == sends;
      std::vector<std::byte> memory(kLarge, sender ? kNew : kOld);
      const ConstBytes piece = memory;
      const Message message = sender ? Message{.send = {&piece, 1}, .to = other}
                                     : Message{.receive = memory, .from = other};
      if (comm.rank() == 0) {
        auto transfer = comm.Start(message);
        started = true;
        while (!copying) std::this_thread::yield();
        const auto until = std::chrono::steady_clock::now() + delay;
        while (std::chrono::steady_clock::now() < until) continue;
        if (throws) throw std::runtime_error("dropped");
        transfer.reset();
        std::fill(memory.begin(), memory.end(), kOverwritten);
        while (!started_too) std::this_thread::yield();
        std::this_thread::sleep_for(1ms);
        EXPECT_TRUE(all_are(memory, kOverwritten));
        throw std::runtime_error("dropped");
      }
      while (!started) std::this_thread::yield();
      copying = true;
      const auto transfer = comm.Start(message);
      started_too = true;
      transfer->Wait();  // copies what it can, unless rank 0 was faster
      EXPECT_TRUE(all_are(memory, kNew)) << "half a message";
    });
    // Rank 1 may have been stopped before its Start by what rank 0 threw.
    arrived += outcomes[1].kind == Kind::kReturned ? 1 : 0;
    if (outcomes[1].kind != Kind::kReturned) {
      EXPECT_EQ(outcomes[1].what, "rank 0 failed: dropped");
    }
    ExpectThrown<std::runtime_error>(outcomes, "dropped");
  }
  EXPECT_GT(arrived, 0) << "no message was copied in time";
  ExpectNewGroupWorks(2);
}

// Three ranks exchange large messages, in memory that is new every time; a fourth one ends it.
TEST(DroppedTransferTest, MemoryMayBeFreedWhenAThirdRankFails) {
  constexpr std::size_t kLarge = std::size_t{1} << 20;
  std::minstd_rand random(6);
  for (int repetition = 0; repetition < 60; ++repetition) {
    const auto delay = std::chrono::microseconds(random() % 4000);
    const Outcomes outcomes = RunAndRecord({.ranks = 4, .timeout = kLong}, [&](Communicator& comm) {
      if (comm.rank() == 3) {
        std::this_thread::sleep_for(delay);
        throw std::runtime_error("the end");
      }
      for (;;) {
        std::vector<std::vector<std::byte>> memory;
        std::vector<ConstBytes> pieces(4);
        std::vector<std::unique_ptr<Transfer>> transfers;
        for (int step = 1; step < 3; ++step) {
          const int to = (comm.rank() + step) % 3;
          const int from = (comm.rank() + 3 - step) % 3;
          pieces[static_cast<std::size_t>(step)] = memory.emplace_back(kLarge);
          transfers.push_back(comm.Start({.send = {&pieces[static_cast<std::size_t>(step)], 1},
                                          .to = to,
                                          .receive = memory.emplace_back(kLarge),
                                          .from = from}));
        }
        for (const auto& transfer : transfers) transfer->Wait();
      }
    });
    ExpectOthersFailed(outcomes, 3, "rank 3 failed: the end");
    ExpectThrown<std::runtime_error>(outcomes, "the end");
  }
  ExpectNewGroupWorks(4);
}

}  // namespace
}  // namespace treeline::test
