// Collectives: what arrives, exactly, and what it costs, on every rank.

#include "schedule/collectives/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <numeric>
#include <random>
#include <thread>

#include "comm/rank_outcomes.h"
#include "comm/subgroup.h"

namespace treeline::test {
namespace {

std::size_t Index(int i) { return static_cast<std::size_t>(i); }

void ExpectCounters(Communicator& comm, const CommCounters& expected) {
  const CommCounters counters = comm.counters();
  EXPECT_EQ(counters.bytes, expected.bytes) << "rank " << comm.rank();
  EXPECT_EQ(counters.messages, expected.messages) << "rank " << comm.rank();
  EXPECT_EQ(counters.rounds, expected.rounds) << "rank " << comm.rank();
  comm.ResetCounters();
}

// Delays of a rank, so that each comes to a collective at another time.
class Dawdler {
 public:
  explicit Dawdler(const Communicator& comm) : random_(static_cast<unsigned>(comm.rank() + 1)) {}

  void Dawdle() {
    if (random_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
  }

 private:
  std::minstd_rand random_;
};

void AddIntegers(Bytes mine, ConstBytes theirs) {
  auto* sum = reinterpret_cast<std::int64_t*>(mine.data());
  const auto* other = reinterpret_cast<const std::int64_t*>(theirs.data());
  for (std::size_t i = 0; i < mine.size() / sizeof(std::int64_t); ++i) sum[i] += other[i];
}

// Every rank has a value of its own in every place; wrong ranks, or one taken twice, change a sum.
std::int64_t Term(int rank, std::size_t i) {
  return (std::int64_t{1} << (rank % 60)) + static_cast<std::int64_t>(i) * (rank + 1);
}

void ExpectSum(Communicator& comm, std::size_t count, const std::vector<int>& terms) {
  std::vector<std::int64_t> value(count);
  std::vector<std::int64_t> scratch(count, -1);
  for (std::size_t i = 0; i < count; ++i) value[i] = Term(terms[Index(comm.rank())], i);
  AllReduce(comm, std::as_writable_bytes(std::span(value)),
            std::as_writable_bytes(std::span(scratch)), AddIntegers);
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t expected = 0;
    for (const int term : terms) expected += Term(term, i);
    ASSERT_EQ(value[i], expected) << "rank " << comm.rank() << ", value " << i;
  }
}

std::vector<int> UpTo(int n) {
  std::vector<int> ranks(Index(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The formulas of collectives.h, rank by rank. A rank without a fold sends its first message at
// once, beside the folds, so that not every chain is longer for them.
CommCounters CostOfAllReduce(int n, int rank, std::int64_t bytes) {
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const int k = std::bit_width(static_cast<unsigned>(n)) - 1;
  const int folded = n - core;
  const int partner = rank % core;  // of a rank that folds; itself otherwise
  // The chain that starts at the partner farthest away: longer if that one had to wait.
  const int chain = core - 1 - partner < folded ? k + 1 : k;
  if (bytes == 0) return {};
  if (rank >= core) return {.bytes = bytes, .messages = 1, .rounds = chain + 1};
  const int messages = rank < folded ? k + 1 : k;
  return {.bytes = messages * bytes, .messages = messages, .rounds = chain};
}

class CollectivesTest : public testing::TestWithParam<int> {
 protected:
  const int n_ = GetParam();

  void Run(const std::function<void(Communicator&)>& body) const {
    RunRanks({.ranks = n_, .timeout = 60s}, body);
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesTest,
                         testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17,
                                         64),
                         testing::PrintToStringParamName());

TEST_P(CollectivesTest, AllReduceSumsExactlyAtItsCost) {
  Run([&](Communicator& comm) {
    for (const std::size_t count : {0, 1, 5, 1000}) {
      ExpectSum(comm, count, UpTo(n_));
      const auto bytes = static_cast<std::int64_t>(count * sizeof(std::int64_t));
      ExpectCounters(comm, CostOfAllReduce(n_, comm.rank(), bytes));
    }
  });
}

// All that collectives.h says in words about the whole group.
TEST_P(CollectivesTest, AllReduceTakesTheRoundsOfItsHeader) {
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n_)));
  const int k = std::bit_width(static_cast<unsigned>(n_)) - 1;
  const int folded = n_ - core;
  std::int64_t most = 0;
  for (int r = 0; r < n_; ++r) most = std::max(most, CostOfAllReduce(n_, r, 8).rounds);
  EXPECT_EQ(most, folded == 0 ? k : 2 * folded > core ? k + 2 : k + 1);
}

TEST_P(CollectivesTest, ManyInARowDoNotMix) {
  Run([&](Communicator& comm) {
    Dawdler dawdler(comm);
    std::vector<int> terms = UpTo(n_);
    for (int i = 0; i < (n_ > 17 ? 10 : 60); ++i) {
      dawdler.Dawdle();
      std::rotate(terms.begin(), terms.begin() + 1, terms.end());
      ExpectSum(comm, Index(i % 3 + 1), terms);
    }
  });
}

// Sizes depend on both ranks; many are 0. Each message goes in two pieces.
TEST_P(CollectivesTest, AllToAllDeliversToEachItsOwn) {
  const auto size = [](int from, int to) { return Index((from * 3 + to * 5) % 7 * 11); };
  Run([&](Communicator& comm) {
    const int rank = comm.rank();
    std::vector<std::vector<std::byte>> out;
    std::vector<Pieces> send(Index(n_));
    std::vector<Inbox> in;
    std::vector<Bytes> receive;
    CommCounters expected;
    for (int r = 0; r < n_; ++r) {
      // What a rank would send to itself is ignored, whatever it is.
      const ConstBytes all = out.emplace_back(Payload(rank, r, 0, size(rank, r)));
      send[Index(r)] = {all.first(all.size() / 2), all.subspan(all.size() / 2)};
      receive.push_back(in.emplace_back(size(r, rank)).bytes());
      if (r == rank) continue;
      expected.bytes += static_cast<std::int64_t>(all.size());
      expected.messages += all.empty() ? 0 : 1;
      if (size(r, rank) > 0) expected.rounds = 1;
    }
    AllToAll(comm, send, receive);
    for (int r = 0; r < n_; ++r) {
      EXPECT_TRUE(r == rank ? in[Index(r)].Untouched()
                            : in[Index(r)].Holds(Payload(r, rank, 0, size(r, rank))))
          << "from " << r << " to " << rank;
    }
    ExpectCounters(comm, expected);
  });
}

TEST_P(CollectivesTest, AllGatherDeliversEveryRanksPiecesToAll) {
  const auto size = [](int from) { return Index(from * 5 % 4 * 13); };
  Run([&](Communicator& comm) {
    const int rank = comm.rank();
    const std::vector<std::byte> out = Payload(rank, 0, 0, size(rank));
    const ConstBytes all = out;
    std::vector<Inbox> in;
    std::vector<Bytes> receive;
    for (int r = 0; r < n_; ++r) receive.push_back(in.emplace_back(size(r)).bytes());
    AllGather(comm, {all.first(all.size() / 3), {}, all.subspan(all.size() / 3)}, receive);
    bool any = false;
    for (int r = 0; r < n_; ++r) {
      EXPECT_TRUE(r == rank ? in[Index(r)].Untouched()
                            : in[Index(r)].Holds(Payload(r, 0, 0, size(r))))
          << "from " << r << " to " << rank;
      any = any || (r != rank && size(r) > 0);
    }
    ExpectCounters(comm, {.bytes = static_cast<std::int64_t>(all.size()) * (n_ - 1),
                          .messages = all.empty() ? 0 : n_ - 1,
                          .rounds = any ? 1 : 0});
  });
}

TEST_P(CollectivesTest, GatherToBringsAllToEveryRoot) {
  const auto size = [](int from) { return Index(from % 3 * 9); };
  Run([&](Communicator& comm) {
    const int rank = comm.rank();
    for (int root = 0; root < n_; ++root) {
      std::vector<Inbox> in;
      std::vector<Bytes> receive;
      bool any = false;
      for (int r = 0; r < n_; ++r) {
        receive.push_back(in.emplace_back(size(r)).bytes());
        any = any || (r != root && size(r) > 0);
      }
      GatherTo(comm, root, Payload(rank, root, 0, size(rank)), receive);
      for (int r = 0; r < n_; ++r) {
        EXPECT_TRUE(rank == root && r != root ? in[Index(r)].Holds(Payload(r, root, 0, size(r)))
                                              : in[Index(r)].Untouched())
            << "from " << r << " to " << root << " at " << rank;
      }
      const bool sends = rank != root && size(rank) > 0;
      ExpectCounters(comm, {.bytes = sends ? static_cast<std::int64_t>(size(rank)) : 0,
                            .messages = sends ? 1 : 0,
                            .rounds = rank == root && any ? 1 : 0});
    }
  });
}

TEST_P(CollectivesTest, BroadcastBringsEveryRootsValueToAll) {
  Run([&](Communicator& comm) {
    for (int root = 0; root < n_; ++root) {
      for (const std::size_t bytes : {0, 1, 300}) {
        std::vector<std::byte> value = Payload(comm.rank(), 0, 0, bytes);
        Broadcast(comm, root, value);
        EXPECT_EQ(value, Payload(root, 0, 0, bytes)) << "rank " << comm.rank();
        const bool sends = comm.rank() == root && bytes > 0;
        ExpectCounters(comm, {.bytes = sends ? static_cast<std::int64_t>(bytes) * (n_ - 1) : 0,
                              .messages = sends ? n_ - 1 : 0,
                              .rounds = comm.rank() != root && bytes > 0 ? 1 : 0});
      }
    }
  });
}

TEST_P(CollectivesTest, NobodyLeavesABarrierBeforeAllHaveCome) {
  constexpr int kBarriers = 20;
  const int rounds = std::bit_width(static_cast<unsigned>(n_ - 1));  // ceil(log2 n)
  std::atomic<int> came{0};
  Run([&](Communicator& comm) {
    Dawdler dawdler(comm);
    for (int i = 1; i <= kBarriers; ++i) {
      dawdler.Dawdle();
      ++came;
      Barrier(comm);
      EXPECT_GE(came, i * n_) << "someone is still outside";
      EXPECT_LE(came, i * n_ + n_ - 1) << "someone has passed the next one";
      ExpectCounters(comm, {.bytes = rounds, .messages = rounds, .rounds = rounds});
    }
  });
}

// Groups of three, the last one of what is left, all at work at the same time; members in another
// order than in the parent.
TEST_P(CollectivesTest, RaggedSubgroupsWorkSideBySide) {
  Run([&](Communicator& comm) {
    const int first = comm.rank() / 3 * 3;
    std::vector<int> members;
    for (int r = std::min(first + 3, n_) - 1; r >= first; --r) members.push_back(r);
    Subgroup group(comm, members);
    const int size = static_cast<int>(members.size());
    EXPECT_EQ(group.size(), size);
    EXPECT_EQ(members[Index(group.rank())], comm.rank());
    EXPECT_EQ(group.timeout(), comm.timeout());
    Dawdler dawdler(comm);
    for (int i = 0; i < 10; ++i) {
      dawdler.Dawdle();
      ExpectSum(group, 7, members);
      EXPECT_EQ(group.counters().bytes, comm.counters().bytes);
      ExpectCounters(group, CostOfAllReduce(size, group.rank(), 56));
      EXPECT_EQ(comm.counters().bytes, 0);
      std::vector<std::byte> value = Payload(comm.rank(), 0, 0, 5);
      Broadcast(group, size - 1, value);
      EXPECT_EQ(value, Payload(first, 0, 0, 5)) << "the last member is the first rank";
      group.ResetCounters();
    }
    // Then the first ranks of the groups among themselves, in a group of a group.
    std::vector<int> leaders;
    for (int r = n_ - 1; r >= 0; --r) {
      if (r % 3 == 0) leaders.push_back(r);
    }
    if (comm.rank() != first) return;
    std::vector<int> backwards;
    for (int r = n_ - 1; r >= 0; --r) backwards.push_back(r);
    Subgroup all(comm, backwards);
    std::vector<int> of_all;
    for (const int r : leaders) of_all.push_back(n_ - 1 - r);
    Subgroup between(all, of_all);
    ExpectSum(between, 3, leaders);
  });
}

TEST(SubgroupTest, KnowsItsMembersOnly) {
  RunRanks({.ranks = 4, .timeout = kLong}, [](Communicator& comm) {
    if (comm.rank() > 1) return;
    EXPECT_THROW(Subgroup(comm, {2, 3}), ArgumentError);
    EXPECT_THROW(Subgroup(comm, {}), ArgumentError);
    Subgroup group(comm, {1, 0});
    for (const int peer : {group.rank(), -2, 2, 3}) {
      EXPECT_THROW(group.Start({.to = peer}), ArgumentError) << peer;
      EXPECT_THROW(group.Start({.from = peer}), ArgumentError) << peer;
    }
    Barrier(group);
  });
}

// Through a subgroup too, a failure reaches all ranks of the parent.
TEST(SubgroupTest, AbortsTheWholeGroup) {
  const Outcomes outcomes = RunAndRecord({.ranks = 4, .timeout = kLong}, [](Communicator& comm) {
    const int first = comm.rank() / 2 * 2;
    Subgroup group(comm, {first, first + 1});
    if (comm.rank() == 3) {
      group.Abort("no more");
      throw std::runtime_error("later");
    }
    std::byte value{0};
    comm.Exchange({}, kNoRank, {&value, 1}, 3);
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(outcomes[rank].what, "rank 3 failed: no more");
  ExpectThrown<std::runtime_error>(outcomes, "later");
}

}  // namespace
}  // namespace treeline::test
