// Messages between threads, and what is counted of them. What happens when a rank fails is in
// thread_failure_test.cc.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "comm/rank_outcomes.h"
#include "comm/thread/event.h"

namespace treeline::test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kMaxPending = Communicator::kMaxPending;

// A message with its memory; the transfer is destroyed first.
class Parcel {
 public:
  Parcel(int from, int to, int index, std::size_t bytes)
      : from_(from), to_(to), index_(index), out_(Payload(from, to, index, bytes)), in_(bytes) {
    // As one message: a part, nothing, the rest, and nothing again.
    const ConstBytes all = out_;
    pieces_ = {all.first(bytes / 3), {}, all.subspan(bytes / 3), {}};
  }

  int to() const { return to_; }
  ConstBytes out() const { return out_; }
  std::span<const ConstBytes> pieces() const { return pieces_; }
  Bytes in() { return in_.bytes(); }

  void Start(Communicator& comm, const Message& message) { transfer_ = comm.Start(message); }
  void StartSend(Communicator& comm) { Start(comm, {.send = pieces_, .to = to_}); }
  void StartReceive(Communicator& comm) { Start(comm, {.receive = in(), .from = from_}); }
  void Wait() { transfer_->Wait(); }
  void ExpectArrived() const {
    EXPECT_TRUE(in_.Holds(out_)) << "message " << index_ << " from " << from_ << " to " << to_;
  }

 private:
  int from_;
  int to_;
  int index_;
  std::vector<std::byte> out_;
  std::vector<ConstBytes> pieces_;
  Inbox in_;
  std::unique_ptr<Transfer> transfer_;
};

using Parcels = std::vector<std::unique_ptr<Parcel>>;

class RanksTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest, testing::Values(2, 3, 4, 5, 6, 7, 8, 9, 64),
                         testing::PrintToStringParamName());

TEST_P(RanksTest, EveryPairGetsEveryByteAndCountsIt) {
  const int n = GetParam();
  constexpr std::size_t kSizes[] = {0, 1, 4099};
  RunRanks({.ranks = n}, [&](Communicator& comm) {
    const int rank = comm.rank();
    EXPECT_EQ(comm.size(), n);
    Parcels parcels;
    Parcels sent;
    for (int step = 1; step < n; ++step) {
      const int to = (rank + step) % n;
      const int from = (rank + n - step) % n;
      for (int index = 0; index < 3; ++index) {
        const std::size_t bytes = kSizes[index];
        const auto& out = sent.emplace_back(std::make_unique<Parcel>(rank, to, index, bytes));
        const auto& in = parcels.emplace_back(std::make_unique<Parcel>(from, rank, index, bytes));
        in->Start(comm, {.send = out->pieces(), .to = to, .receive = in->in(), .from = from});
      }
    }
    std::reverse(parcels.begin(), parcels.end());  // waits need not come in order
    for (const auto& parcel : parcels) {
      parcel->Wait();
      parcel->ExpectArrived();
      parcel->Wait();  // nothing is left to wait for
    }
    const CommCounters counters = comm.counters();
    EXPECT_EQ(counters.bytes, (n - 1) * 4100);
    EXPECT_EQ(counters.messages, (n - 1) * 2) << "empty messages do not count";
    EXPECT_EQ(counters.rounds, 1) << "all were on their way at the same time";
    comm.ResetCounters();
    EXPECT_EQ(comm.counters().bytes + comm.counters().messages + comm.counters().rounds, 0);
  });
}

// A message that each rank hands on when it has come; every rank also sends one that depends on
// nothing.
TEST_P(RanksTest, RoundsAreTheLongestChain) {
  const int n = GetParam();
  RunRanks({.ranks = n}, [&](Communicator& comm) {
    const int rank = comm.rank();
    const int to = (rank + 1) % n;
    const int from = (rank + n - 1) % n;
    std::byte value{0};
    std::byte other{0};
    comm.Exchange({&value, 1}, to, {&other, 1}, from);
    EXPECT_EQ(comm.counters().rounds, 1);
    comm.ResetCounters();
    if (rank > 0) comm.Exchange({}, kNoRank, {&value, 1}, from);
    if (rank < n - 1) comm.Exchange({&value, 1}, to, {}, kNoRank);
    EXPECT_EQ(comm.counters().rounds, rank);
    EXPECT_EQ(comm.counters().messages, rank < n - 1 ? 1 : 0);
    // An empty message closes the circle, and adds nothing.
    if (rank == 0) comm.Start({.from = from})->Wait();
    if (rank == n - 1) comm.Start({.to = 0})->Wait();
    EXPECT_EQ(comm.counters().rounds, rank);
  });
}

TEST(RoundsTest, AMessageStartedBeforeAnotherArrivedDoesNotDependOnIt) {
  RunRanks({.ranks = 3}, [](Communicator& comm) {
    std::byte value{1};
    const ConstBytes piece{&value, 1};
    std::byte in{0};
    if (comm.rank() == 0) comm.Exchange(piece, 1, {}, kNoRank);
    if (comm.rank() == 1) {
      const auto receive = comm.Start({.receive = {&in, 1}, .from = 0});
      const auto send = comm.Start({.send = {&piece, 1}, .to = 2});
      receive->Wait();
      send->Wait();
    }
    if (comm.rank() == 2) comm.Exchange({}, kNoRank, {&in, 1}, 1);
    EXPECT_EQ(comm.counters().rounds, comm.rank() == 0 ? 0 : 1);
  });
}

TEST(RoundsTest, TheLongerOfTwoChainsCounts) {
  RunRanks({.ranks = 4}, [](Communicator& comm) {  // 0 -> 1 -> 2 -> 3, and 0 -> 3 last of all
    std::byte value{0};
    const ConstBytes out{&value, 1};
    const Bytes in{&value, 1};
    if (comm.rank() > 0) comm.Exchange({}, kNoRank, in, comm.rank() - 1);
    if (comm.rank() < 3) comm.Exchange(out, comm.rank() + 1, {}, kNoRank);
    if (comm.rank() == 0) comm.Exchange(out, 3, {}, kNoRank);
    if (comm.rank() == 3) comm.Exchange({}, kNoRank, in, 0);
    EXPECT_EQ(comm.counters().rounds, comm.rank());
  });
}

TEST(OrderTest, MessagesArriveInTheOrderOfTheirStart) {
  constexpr int kMessages = 3000;
  RunRanks({.ranks = 2}, [](Communicator& comm) {
    const int other = 1 - comm.rank();
    std::minstd_rand random(static_cast<unsigned>(7 + comm.rank()));
    Parcels pending;  // one of each direction by turns
    for (int index = 0; index < kMessages + kMaxPending; ++index) {
      if (index >= kMaxPending) {
        for (int i = 0; i < 2; ++i) {
          pending.front()->Wait();
          if (pending.front()->to() == comm.rank()) pending.front()->ExpectArrived();
          pending.erase(pending.begin());
        }
      }
      if (index >= kMessages) continue;
      const std::size_t bytes = static_cast<std::size_t>(index % 50);
      const auto& out =
          pending.emplace_back(std::make_unique<Parcel>(comm.rank(), other, index, bytes));
      out->StartSend(comm);
      if (random() % 4 == 0) std::this_thread::yield();
      const auto& in =
          pending.emplace_back(std::make_unique<Parcel>(other, comm.rank(), index, bytes));
      in->StartReceive(comm);
    }
  });
}

// What a rank may start before it waits; one more changes nothing.
TEST(PendingTest, MoreThanAllowedIsRefusedAndLeavesTheRestIntact) {
  RunRanks({.ranks = 2, .timeout = kLong}, [](Communicator& comm) {
    const int other = 1 - comm.rank();
    Parcels parcels;
    for (int index = 0; index < kMaxPending; ++index) {
      parcels.push_back(std::make_unique<Parcel>(0, 1, index, 100));
      if (comm.rank() == 0) parcels.back()->StartSend(comm);
      if (comm.rank() == 1) parcels.back()->StartReceive(comm);
    }
    {
      Parcel extra(comm.rank(), other, 99, 100);
      Parcel reverse(other, comm.rank(), 98, 100);
      // The other direction has room, but must not be started alone.
      Message message{.send = extra.pieces(), .to = other};
      if (comm.rank() == 1) message = {.receive = extra.in(), .from = other};
      Message both{.send = extra.pieces(), .to = other, .receive = reverse.in(), .from = other};
      EXPECT_THAT([&] { comm.Start(message); },
                  ThrowsMessage<ArgumentError>(HasSubstr("not waited for")));
      EXPECT_THROW(comm.Start(both), ArgumentError);
    }
    for (const auto& parcel : parcels) parcel->Wait();
    for (int index = 0; index < 20; ++index) {
      Parcel out(comm.rank(), other, index, 10);
      Parcel in(other, comm.rank(), index, 10);
      comm.Exchange(out.out(), other, in.in(), other);
      in.ExpectArrived();
    }
    for (const auto& parcel : parcels) {
      if (comm.rank() == 1) parcel->ExpectArrived();
    }
  });
}

// Rank 1 waits for a message of rank 0 before it looks after its own, all of which have arrived.
TEST(PendingTest, StartDoesNotWaitForThePeer) {
  RunRanks({.ranks = 2, .timeout = 20s}, [](Communicator& comm) {
    Parcels parcels;
    for (int index = 0; index < kMaxPending; ++index) {
      parcels.push_back(std::make_unique<Parcel>(1, 0, index, 9));
      if (comm.rank() == 0) {
        parcels.back()->StartReceive(comm);
        parcels.back()->Wait();
      } else {
        parcels.back()->StartSend(comm);
      }
    }
    Parcel forth(0, 1, 7, 9);
    Parcel back(1, 0, 7, 9);
    if (comm.rank() == 0) {
      comm.Start({.send = forth.pieces(), .to = 1, .receive = back.in(), .from = 1})->Wait();
      back.ExpectArrived();
    } else {
      comm.Exchange({}, kNoRank, forth.in(), 0);
      for (const auto& parcel : parcels) parcel->Wait();
      comm.Exchange(back.out(), 0, {}, kNoRank);
      forth.ExpectArrived();
    }
  });
}

TEST(ArgumentTest, PeersMustBeOtherRanksOfTheGroup) {
  RunRanks({.ranks = 3, .timeout = kLong}, [](Communicator& comm) {
    std::byte value{0};
    const ConstBytes piece{&value, 1};
    for (const int peer : {comm.rank(), -2, 3, INT_MIN, INT_MAX}) {
      EXPECT_THROW(comm.Start({.send = {&piece, 1}, .to = peer}), ArgumentError);
      EXPECT_THROW(comm.Start({.receive = {&value, 1}, .from = peer}), ArgumentError);
      EXPECT_THROW(comm.Start({.to = peer}), ArgumentError);
      // Nothing of a message with one good side is started.
      const int good = (comm.rank() + 1) % 3;
      EXPECT_THROW(
          comm.Start({.send = {&piece, 1}, .to = good, .receive = {&value, 1}, .from = peer}),
          ArgumentError);
      EXPECT_THROW(
          comm.Start({.send = {&piece, 1}, .to = peer, .receive = {&value, 1}, .from = good}),
          ArgumentError);
    }
    // Bytes would be lost, or never come.
    EXPECT_THROW(comm.Exchange(piece, kNoRank, {}, kNoRank), ArgumentError);
    EXPECT_THROW(comm.Exchange({}, kNoRank, {&value, 1}, kNoRank), ArgumentError);
    comm.Exchange({}, kNoRank, {}, kNoRank);
    EXPECT_EQ(comm.counters().messages, 0);
    value = PayloadByte(comm.rank(), 0, 0, 0);
    std::byte in{0};
    const int from = (comm.rank() + 2) % 3;
    comm.Exchange(piece, (comm.rank() + 1) % 3, {&in, 1}, from);
    EXPECT_EQ(in, PayloadByte(from, 0, 0, 0));
  });
}

TEST(ArgumentTest, GroupsHaveBounds) {
  const auto make = [](const ThreadRanks& options) { ThreadGroup group(options); };
  EXPECT_THROW(make({.ranks = 0}), ArgumentError);
  EXPECT_THROW(make({.ranks = -1}), ArgumentError);
  EXPECT_THROW(make({.ranks = ThreadGroup::kMaxRanks + 1}), ArgumentError);
  EXPECT_THROW(make({.timeout = 0ms}), ArgumentError);
  EXPECT_THROW(make({.timeout = -1ms}), ArgumentError);
  EXPECT_THROW(make({.timeout = std::chrono::milliseconds::max()}), ArgumentError);
  EXPECT_THROW(make({.threads_per_rank = 0}), ArgumentError);
  make({.ranks = 3, .threads_per_rank = INT_MAX});
  ThreadGroup group({.ranks = 3, .timeout = ThreadGroup::kMaxTimeout});
  EXPECT_THROW(group.rank(-1), ArgumentError);
  EXPECT_THROW(group.rank(3), ArgumentError);
  EXPECT_EQ(group.rank(2).rank(), 2);
  EXPECT_EQ(group.failed_rank(), kNoRank);
  EXPECT_THROW(RunRanks({.ranks = 0}, [](Communicator&) {}), ArgumentError);
}

TEST(ArgumentTest, HostsAreNumberedByTheirFirstRanks) {
  for (const std::vector<int>& wrong :
       {std::vector{0, 0}, std::vector{1, 0, 0}, std::vector{0, 2, 1}, std::vector{0, -1, 0}}) {
    EXPECT_THROW(ThreadGroup({.ranks = 3, .hosts = wrong}), ArgumentError);
  }
  const std::vector<int> hosts{0, 1, 0};
  ThreadGroup group({.ranks = 3, .hosts = hosts});
  EXPECT_THAT(group.rank(2).hosts(), testing::ElementsAreArray(hosts));
  ThreadGroup alike({.ranks = 2});
  EXPECT_THAT(alike.rank(1).hosts(), testing::ElementsAre(0, 0));
}

// The longest timeout does not overflow into one that is over before it began.
TEST(ArgumentTest, TheLongestTimeoutIsLong) {
  RunRanks({.ranks = 2, .timeout = ThreadGroup::kMaxTimeout}, [](Communicator& comm) {
    const std::byte out{0};
    std::byte in{1};
    if (comm.rank() == 0) std::this_thread::sleep_for(20ms);
    comm.Exchange({&out, 1}, 1 - comm.rank(), {&in, 1}, 1 - comm.rank());
    EXPECT_EQ(in, out);
  });
}

// Random messages between random ranks. All ranks take them from the same list, in its order, so
// that whatever a rank waits for is started by a peer that waits for earlier ones only.
TEST(TrafficTest, RandomMessagesWithRandomDelaysArrive) {
  constexpr int kRanks = 6;
  constexpr int kMessages = 4000;
  RunRanks({.ranks = kRanks, .timeout = 60s}, [](Communicator& comm) {
    std::minstd_rand list(11);
    std::minstd_rand own(static_cast<unsigned>(100 + comm.rank()));
    std::map<std::pair<int, int>, Parcels> pending;
    const auto finish = [&](Parcels& channel) {
      channel.front()->Wait();
      if (channel.front()->to() == comm.rank()) channel.front()->ExpectArrived();
      channel.erase(channel.begin());
    };
    for (int index = 0; index < kMessages; ++index) {
      const int from = static_cast<int>(list() % kRanks);
      const int to = (from + 1 + static_cast<int>(list() % (kRanks - 1))) % kRanks;
      // Large ones are copied in chunks, by both ranks.
      const std::size_t bytes = index % 64 == 0 ? list() % 1'200'000 : list() % 200;
      if (from != comm.rank() && to != comm.rank()) continue;
      auto& channel = pending[{from, to}];
      if (channel.size() == kMaxPending) finish(channel);
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 150));
      Parcel& parcel = *channel.emplace_back(std::make_unique<Parcel>(from, to, index, bytes));
      if (from == comm.rank()) {
        parcel.StartSend(comm);
      } else {
        parcel.StartReceive(comm);
      }
      if (own() % 3 == 0) finish(channel);
    }
    for (auto& [ranks, channel] : pending) {
      while (!channel.empty()) finish(channel);
    }
  });
}

using Clock = std::chrono::steady_clock;

// Two threads that wait for each other by turns, mostly asleep: a wake-up that is lost shows as a
// wait that lasts to its end.
TEST(EventTest, NoWakeUpIsLost) {
  constexpr int kTurns = 20'000;
  std::array<Event, 2> events;
  std::atomic<int> turn{0};
  const auto play = [&](int self) {
    for (int i = self; i < kTurns; i += 2) {
      const auto mine = [&] { return turn.load(std::memory_order_acquire) == i; };
      const bool came = events[static_cast<std::size_t>(self)].Await(
          mine, std::chrono::microseconds(i % 3), Clock::now() + kAtOnce);
      if (!came) return false;
      turn.store(i + 1, std::memory_order_release);
      events[static_cast<std::size_t>(1 - self)].Notify();
    }
    return true;
  };
  bool other = false;
  std::thread thread([&] { other = play(1); });
  EXPECT_TRUE(play(0));
  thread.join();
  EXPECT_TRUE(other);
  EXPECT_EQ(turn, kTurns);
}

// The change comes right after a look that did not see it yet: the worst moment to fall asleep.
TEST(EventTest, AChangeJustAfterALookIsSeen) {
  for (int last_look = 0; last_look < 3; ++last_look) {
    Event event;
    int looks = 0;
    bool changed = false;
    const auto start = Clock::now();
    EXPECT_TRUE(event.Await(
        [&] {
          const bool seen = changed;
          if (looks++ == last_look) {
            changed = true;
            event.Notify();
          } else if (!seen) {
            event.Notify();  // of something else
          }
          return seen;
        },
        0us, start + kAtOnce));
    EXPECT_LT(Clock::now() - start, kAtOnce / 2);
  }
}

TEST(EventTest, SeveralThreadsMayNotify) {
  constexpr int kNotifiers = 3;
  constexpr int kChanges = 5'000;
  Event event;
  std::atomic<int> changes{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kNotifiers; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kChanges; ++i) {
        changes.fetch_add(1, std::memory_order_release);
        event.Notify();
      }
    });
  }
  for (int seen = 0; seen < kNotifiers * kChanges;) {
    const auto more = [&] { return changes.load(std::memory_order_acquire) > seen; };
    ASSERT_TRUE(event.Await(more, 0us, Clock::now() + kAtOnce)) << seen;
    seen = changes;
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(EventTest, ReturnsAtTheDeadlineAndNotBefore) {
  Event event;
  for (const auto wait : {1ms, 30ms}) {
    const auto start = Clock::now();
    EXPECT_FALSE(event.Await([] { return false; }, 0us, start + wait));
    EXPECT_GE(Clock::now() - start, wait);
    EXPECT_LT(Clock::now() - start, kAtOnce);
  }
  EXPECT_TRUE(event.Await([] { return true; }, 0us, Clock::now())) << "ready is never late";
}

}  // namespace
}  // namespace treeline::test
