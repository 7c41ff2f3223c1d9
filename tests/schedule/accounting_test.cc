// What every schedule sends, holds and computes, against closed formulas: exactly, not by timing.
// N ranks, k = floor(log2 N); R = B * H rows of B query tokens and H heads; w = 4 * Dv + 4 bytes a
// row of a partial; S tokens in all, S_next of them on the next rank.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "cli/rank_check.h"
#include "schedule/cost.h"
#include "schedule/counted_run.h"

namespace treeline::test {
namespace {

// What one rank sends by a formula.
struct Sent {
  std::int64_t bytes = 0;
  std::int64_t messages = 0;

  Sent operator+(const Sent& other) const {
    return {bytes + other.bytes, messages + other.messages};
  }
};
Sent Times(std::int64_t messages, std::int64_t bytes) { return {messages * bytes, messages}; }

// `of_rank(r)` is what rank r sends, `rounds` the most of any rank.
template <class OfRank>
void ExpectSpent(const Spent& spent, std::int64_t rounds, const OfRank& of_rank) {
  for (int r = 0; r < static_cast<int>(spent.counters.size()); ++r) {
    const Sent sent = of_rank(r);
    EXPECT_EQ(spent.counters[Index(r)].bytes, sent.bytes) << "rank " << r;
    EXPECT_EQ(spent.counters[Index(r)].messages, sent.messages) << "rank " << r;
  }
  EXPECT_EQ(spent.Rounds(), rounds);
}

// The all-reduce by recursive doubling: 2^k ranks are the core, the others fold into its first.
class Tree {
 public:
  explicit Tree(int ranks)
      : k_(std::bit_width(static_cast<unsigned>(ranks)) - 1),
        core_(1 << k_),
        folded_(ranks - core_) {}

  Sent OfRank(int rank, std::int64_t bytes) const {
    return Times(rank >= core_ ? 1 : rank < folded_ ? k_ + 1 : k_, bytes);
  }

  // In the core, news of rank j reach rank i by one message for every bit in which they differ. So
  // the longest chain of k messages ends at i and starts at its complement 2^k - 1 - i; it is one
  // longer if another rank has folded into that, and again if the result goes on to one.
  int RoundsOf(int rank) const {
    if (rank >= core_) return RoundsOf(rank - core_) + 1;
    return k_ + (core_ - 1 - rank < folded_ ? 1 : 0);
  }

  // k for a power of two. Otherwise there are k + 2 steps. A chain goes through all of them if both
  // of its ends in the core have a folded partner: with more than 2^(k-1) folded ranks.
  int Rounds() const { return folded_ == 0 ? k_ : folded_ > core_ / 2 ? k_ + 2 : k_ + 1; }

  // Whether every longest chain starts or ends at the last rank.
  bool NeedsLastRank() const {
    if (folded_ == 0) return k_ == 1;
    return folded_ == 1 || folded_ == core_ / 2 + 1;
  }

 private:
  int k_;
  int core_;
  int folded_;
};

// Items of rank r when `count` of them are dealt one by one.
std::int64_t ShareOf(std::int64_t count, int ranks, int r) {
  return (count + ranks - 1 - r) / ranks;
}

// Every rank sends each other the rows that the other reduces, then its own result to all.
Sent SharedReduction(std::int64_t items, std::int64_t item_bytes, int ranks, int r) {
  const std::int64_t own = ShareOf(items, ranks, r);
  Sent sent{(items - own) * item_bytes + (ranks - 1) * own * item_bytes, 0};
  for (int other = 0; other < ranks; ++other) {
    if (other != r && ShareOf(items, ranks, other) > 0) ++sent.messages;
  }
  if (own > 0) sent.messages += ranks - 1;
  return sent;
}

// Tokens of every rank, of all sequences.
std::vector<std::int64_t> TokensOfRanks(const Batch& batch, Dealing dealing, int ranks,
                                        std::int64_t Batch::Sequence::*tokens) {
  std::vector<std::int64_t> of_rank(Index(ranks));
  for (const Batch::Sequence& s : batch.sequences) {
    const std::vector<Positions> shards = Deal(dealing, s.*tokens, ranks);
    for (int r = 0; r < ranks; ++r) of_rank[Index(r)] += shards[Index(r)].count();
  }
  return of_rank;
}

// Blocks of `token_bytes` a token that rank r passes on if all but that of `except` come by it.
Sent Passed(std::span<const std::int64_t> tokens, std::int64_t token_bytes, int except) {
  Sent sent;
  for (int owner = 0; owner < static_cast<int>(tokens.size()); ++owner) {
    if (owner == except || tokens[Index(owner)] == 0) continue;
    sent = sent + Times(1, tokens[Index(owner)] * token_bytes);
  }
  return sent;
}

// Bytes of `dim` elements.
std::int64_t ElementBytes(DType dtype, std::int64_t dim) {
  switch (dtype) {
    case DType::kF32:
      return 4 * dim;
    case DType::kBF16:
    case DType::kF16:
      return 2 * dim;
    case DType::kQ8_0:
      return dim * 34 / 32;  // for multiples of 32
  }
  return 0;
}

std::int64_t KeyBytes(const Batch& batch) {  // of a token
  return batch.spec.kv_heads * (ElementBytes(batch.kv_dtype, batch.spec.head_dim) +
                                ElementBytes(batch.kv_dtype, batch.spec.v_head_dim));
}

// (S - S_next) * Hkv * (Dk + Dv) * bytes of an element.
Sent RingKv(const Batch& batch, std::span<const std::int64_t> tokens, int r) {
  const auto ranks = static_cast<int>(tokens.size());
  return Passed(tokens, KeyBytes(batch), (r + 1) % ranks);
}

AttentionSpec SpecOf(int heads, int kv_heads, int head_dim, int v_head_dim) {
  AttentionSpec spec = AttentionSpec::Make(heads, kv_heads, head_dim);
  spec.v_head_dim = v_head_dim;
  return spec;
}

// Fewer rows than ranks, as many, more; several sequences; tokens enough for each of 64 ranks.
std::vector<Batch> DecodeBatches() {
  return {{.spec = SpecOf(1, 1, 8, 8), .sequences = {{1, 400}}},
          {.spec = SpecOf(4, 1, 24, 16), .sequences = {{2, 399}}},
          {.spec = SpecOf(9, 3, 16, 16), .sequences = {{17, 401}}},
          {.spec = SpecOf(6, 2, 8, 40), .sequences = {{3, 400}, {1, 130}, {5, 400}}}};
}

class RanksTest : public testing::TestWithParam<int> {
 protected:
  const int n_ = GetParam();
};

TEST_P(RanksTest, TreeSendsLogarithmicallyManyPartials) {
  const Tree tree(n_);
  for (const Batch& batch : DecodeBatches()) {
    const Spent spent = CountDecode(batch, Dealing::kStriped, n_, {.schedule = Schedule::kTree});
    ExpectSpent(spent, tree.Rounds(),
                [&](int r) { return tree.OfRank(r, batch.Rows() * batch.RowWidth()); });
    for (int r = 0; r < n_; ++r) {
      EXPECT_EQ(spent.counters[Index(r)].rounds, tree.RoundsOf(r)) << "rank " << r;
    }
  }
}

TEST_P(RanksTest, ReproducibleTreeSendsNoMore) {
  if (64 % n_ != 0) return;  // it takes only numbers of ranks that divide 64
  const Tree tree(n_);
  for (const Batch& batch : DecodeBatches()) {
    ExpectSpent(CountDecode(batch, Dealing::kStriped, n_,
                            {.schedule = Schedule::kTree, .reproducible = true}),
                tree.Rounds(),
                [&](int r) { return tree.OfRank(r, batch.Rows() * batch.RowWidth()); });
  }
}

TEST_P(RanksTest, GatherSendsPartialsToAllAtOnce) {
  for (const Batch& batch : DecodeBatches()) {
    ExpectSpent(CountDecode(batch, Dealing::kStriped, n_, {.schedule = Schedule::kGather}),
                n_ > 1 ? 1 : 0,
                [&](int) { return Times(n_ - 1, batch.Rows() * batch.RowWidth()); });
  }
}

TEST_P(RanksTest, Tree3NeedsThreeTimesTheRoundsOfTree) {
  const Tree tree(n_);
  for (const Batch& batch : DecodeBatches()) {
    ExpectSpent(CountDecode(batch, Dealing::kStriped, n_, {.schedule = Schedule::kTree3}),
                3 * tree.Rounds(), [&](int r) {
                  const std::int64_t rows = batch.Rows();
                  return tree.OfRank(r, rows * 4) + tree.OfRank(r, rows * 4) +
                         tree.OfRank(r, rows * 4 * batch.spec.v_head_dim);
                });
  }
}

TEST_P(RanksTest, HeadsSendsRowsThereAndBack) {
  for (const Batch& batch : DecodeBatches()) {
    ExpectSpent(CountDecode(batch, Dealing::kStriped, n_, {.schedule = Schedule::kHeads}),
                n_ > 1 ? 2 : 0,
                [&](int r) { return SharedReduction(batch.Rows(), batch.RowWidth(), n_, r); });
  }
}

// A token's partial makes n - 1 hops to its home, which sends it to all.
TEST_P(RanksTest, RingQChainsTokensThenBroadcastsThem) {
  for (const Batch& batch : DecodeBatches()) {
    const std::int64_t tokens = batch.QueryTokens();
    const Spent spent = CountDecode(batch, Dealing::kStriped, n_, {.schedule = Schedule::kRingQ});
    ExpectSpent(spent, n_ > 1 ? n_ : 0, [&](int r) {
      return SharedReduction(tokens, batch.spec.heads * batch.RowWidth(), n_, r);
    });
    for (int r = 0; r < n_; ++r) {
      // Only the one home of the only token gets no broadcast.
      const bool told = ShareOf(tokens, n_, r) < tokens;
      EXPECT_EQ(spent.counters[Index(r)].rounds, told ? n_ : n_ - 1) << "rank " << r;
    }
  }
}

TEST_P(RanksTest, TwoLevelSendsOnePartialAMemberAndATreeOfHosts) {
  for (const int node_size : {1, 2, 3, 4}) {
    SCOPED_TRACE(testing::Message() << "nodes of " << node_size);
    const int hosts = (n_ + node_size - 1) / node_size;
    const Tree tree(hosts);
    // A last host of one rank has neither a gather nor a broadcast.
    const bool lone = node_size > 1 && n_ % node_size == 1;
    int rounds = tree.Rounds() + (node_size > 1 ? 2 : 0);
    if (lone && hosts == 1) rounds = 0;
    if (lone && tree.NeedsLastRank()) --rounds;
    for (const Batch& batch : DecodeBatches()) {
      ExpectSpent(CountDecode(batch, Dealing::kStriped, n_,
                              {.schedule = Schedule::kTwoLevel, .node_size = node_size}),
                  rounds, [&](int r) {
                    const std::int64_t bytes = batch.Rows() * batch.RowWidth();
                    const int host = r / node_size;
                    const int members = std::min(node_size, n_ - host * node_size);
                    if (r % node_size != 0) return Times(1, bytes);
                    return tree.OfRank(host, bytes) + Times(members - 1, bytes);
                  });
    }
  }
}

constexpr DType kKeyTypes[] = {DType::kF32, DType::kBF16, DType::kQ8_0};

TEST_P(RanksTest, RingKvSendsAllKeysButThoseOfTheNextRank) {
  for (const DType dtype : kKeyTypes) {
    for (Batch batch : {Batch{.spec = SpecOf(6, 2, 64, 32), .sequences = {{2, 400}}},
                        Batch{.spec = SpecOf(3, 1, 32, 32), .sequences = {{1, 401}, {3, 131}}}}) {
      batch.kv_dtype = dtype;
      for (const Dealing dealing : kFullDealings) {
        const auto tokens = TokensOfRanks(batch, dealing, n_, &Batch::Sequence::keys);
        ASSERT_GT(*std::min_element(tokens.begin(), tokens.end()), 0);
        const Spent spent = CountDecode(batch, dealing, n_, {.schedule = Schedule::kRingKv});
        ExpectSpent(spent, n_ - 1, [&](int r) { return RingKv(batch, tokens, r); });
        for (int r = 0; r < n_; ++r) EXPECT_EQ(spent.counters[Index(r)].rounds, n_ - 1);
        ExpectSpent(CountPrefill(batch, dealing, n_, Schedule::kRingKv), n_ - 1,
                    [&](int r) { return RingKv(batch, tokens, r); });
      }
    }
  }
}

// A block goes round however many of the others are empty.
TEST_P(RanksTest, RingKvSkipsBlocksWithoutTokens) {
  const Batch batch{.spec = SpecOf(2, 2, 16, 8), .sequences = {{1, 300}}};
  const auto tokens = TokensOfRanks(batch, Dealing::kGaps, n_, &Batch::Sequence::keys);
  ExpectSpent(CountDecode(batch, Dealing::kGaps, n_, {.schedule = Schedule::kRingKv}), n_ - 1,
              [&](int r) { return RingKv(batch, tokens, r); });
}

// (B - b_next) * H * Dk * bytes + B * H * (Dv + 1) * 4: n - 1 hops of rows, n of partials.
TEST_P(RanksTest, RingQSendsAllRowsButThoseOfTheNextRankAndAllPartials) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (Batch batch : {Batch{.spec = SpecOf(6, 2, 24, 40), .sequences = {{400, 400}}},
                        Batch{.spec = SpecOf(3, 1, 16, 16), .sequences = {{131, 131}, {401, 401}}},
                        Batch{.spec = SpecOf(2, 1, 16, 8), .sequences = {{17, 400}}}}) {
      batch.q_dtype = dtype;
      const std::int64_t heads = batch.spec.heads;
      for (const Dealing dealing : kFullDealings) {
        const auto tokens = TokensOfRanks(batch, dealing, n_, &Batch::Sequence::queries);
        ExpectSpent(CountPrefill(batch, dealing, n_, Schedule::kRingQ), n_ > 1 ? n_ : 0,
                    [&](int r) -> Sent {
                      if (n_ == 1) return {};
                      const int next = (r + 1) % n_;
                      const std::int64_t query = heads * ElementBytes(dtype, batch.spec.head_dim);
                      const Sent rows = Passed(tokens, query, next);
                      const Sent partials = Passed(tokens, heads * batch.RowWidth(), kNoRank);
                      // A block's rows and partials are one message.
                      return {rows.bytes + partials.bytes, partials.messages};
                    });
      }
    }
  }
}

// b * H * ((n - 1) * Dk * bytes + n * (Dv + 1) * 4) for b rows on every rank.
TEST_P(RanksTest, RingQOfEvenShardsSendsTheSameOnEveryRank) {
  const Batch batch{
      .spec = SpecOf(6, 2, 24, 40), .q_dtype = DType::kBF16, .sequences = {{5 * n_, 7 * n_}}};
  const int hops = n_ > 1 ? n_ : 0;  // one rank sends nothing to itself
  ExpectSpent(CountPrefill(batch, Dealing::kStriped, n_, Schedule::kRingQ), hops, [&](int) {
    return Sent{5 * 6 * ((n_ - 1) * 24 * 2 + hops * (40 + 1) * 4), hops};
  });
}

// Keys as in the forward pass; their gradients, in f32, n hops; those of sinks by a tree.
TEST_P(RanksTest, BackwardSendsKeysTheirGradientsAndTheSinks) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (Batch batch : {Batch{.spec = SpecOf(6, 2, 24, 40), .sequences = {{400, 400}}},
                        Batch{.spec = SpecOf(3, 1, 16, 16), .sequences = {{401, 401}, {5, 5}}}}) {
      batch.kv_dtype = dtype;
      for (const bool sinks : {false, true}) {
        if (sinks) batch.spec.sinks.resize(Index(batch.spec.heads));
        for (const Dealing dealing : kFullDealings) {
          const auto tokens = TokensOfRanks(batch, dealing, n_, &Batch::Sequence::keys);
          const std::int64_t gradient =
              batch.spec.kv_heads * (batch.spec.head_dim + batch.spec.v_head_dim) * 4;
          const Tree tree(n_);
          const int rounds = n_ > 1 ? n_ + (sinks ? tree.Rounds() : 0) : 0;
          ExpectSpent(CountBackward(batch, dealing, n_), rounds, [&](int r) {
            if (n_ == 1) return Sent{};
            const Sent sent = RingKv(batch, tokens, r) + Passed(tokens, gradient, kNoRank);
            return sinks ? sent + tree.OfRank(r, 4 * batch.spec.heads) : sent;
          });
        }
      }
    }
  }
}

// Besides its shard, a rank of the ring holds two blocks of others, or one of the only other.
TEST_P(RanksTest, RingKvHoldsAtMostTwoBlocksOfOthers) {
  const Batch batch{.spec = SpecOf(2, 1, 16, 8), .sequences = {{1, 7 * n_}}};
  const Spent spent = CountDecode(batch, Dealing::kStriped, n_, {.schedule = Schedule::kRingKv});
  for (const std::size_t bytes : spent.in_flight) {
    EXPECT_EQ(static_cast<std::int64_t>(bytes), std::min(n_ - 1, 2) * 7 * KeyBytes(batch));
  }
}

// What `auto` chooses by, for shards of the same size and nodes of the same size.
TEST_P(RanksTest, CostModelKnowsBytesAndRounds) {
  const std::int64_t tokens = 7 * n_;
  for (Batch batch : DecodeBatches()) {
    for (Batch::Sequence& s : batch.sequences) s.keys = tokens;
    for (const int node_size : {1, 2, 3, 4}) {
      if (n_ % node_size != 0) continue;
      for (const Schedule schedule : kDecodeSchedules) {
        SCOPED_TRACE(testing::Message() << Name(schedule) << ", nodes of " << node_size);
        const Spent spent = CountDecode(batch, Dealing::kStriped, n_,
                                        {.schedule = schedule, .node_size = node_size});
        const PredictedCost cost =
            Predict(schedule,
                    {.ranks = n_,
                     .nodes = n_ / node_size,
                     .largest_node = node_size,
                     .tokens = batch.QueryTokens(),
                     .heads = batch.spec.heads,
                     .row_bytes = batch.RowWidth(),
                     .kv_bytes = KeyBytes(batch) * tokens * std::ssize(batch.sequences)},
                    {});
        std::int64_t most = 0;
        for (const CommCounters& c : spent.counters) most = std::max(most, c.bytes);
        EXPECT_EQ(cost.bytes, most);
        EXPECT_EQ(cost.rounds, spent.Rounds());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest, testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64),
                         testing::PrintToStringParamName());

// The claim of Tree Attention, for one token of a model of 32/8 heads x 128.
TEST(ClaimsTest, TreeSendsLessThanOneFiveThousandthOfRingKv) {
  constexpr int kRanks = 8;
  constexpr std::int64_t kTokens = 131'072;
  const Batch batch{
      .spec = SpecOf(32, 8, 128, 128), .kv_dtype = DType::kBF16, .sequences = {{1, kTokens}}};
  const Spent tree = CountDecode(batch, Dealing::kStriped, kRanks, {.schedule = Schedule::kTree});

  // The ring itself with one narrow head, by the formula that holds for the model too.
  Batch narrow = batch;
  narrow.spec = SpecOf(1, 1, 8, 8);
  const auto tokens = TokensOfRanks(batch, Dealing::kStriped, kRanks, &Batch::Sequence::keys);
  ExpectSpent(CountDecode(narrow, Dealing::kStriped, kRanks, {.schedule = Schedule::kRingKv}),
              kRanks - 1, [&](int r) { return RingKv(narrow, tokens, r); });
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_LT(tree.counters[Index(r)].bytes * 5000, RingKv(batch, tokens, r).bytes);
  }
}

// Tree holds its shard and partials; the ring its shard and what it receives.
TEST(ClaimsTest, TreeNeedsHalfOrAThirdOfTheMemoryOfRingKv) {
  constexpr std::int64_t kTokens = 16'384;
  cli::ProblemShape shape;
  shape.spec = AttentionSpec::Make(4, 2, 64);
  shape.q_dtype = shape.kv_dtype = DType::kBF16;
  shape.sequences = {{Positions::Contiguous(kTokens - 1, 1), Positions::Contiguous(0, kTokens)}};
  cli::RankProblem problem(shape);
  struct Case {
    int ranks;
    double most;
  };
  for (const Case& c : {Case{2, 0.55}, Case{8, 0.38}}) {
    const cli::RankSetup setup{.ranks = {.ranks = c.ranks}};
    const cli::RankReport tree = problem.Decode(setup, {.schedule = Schedule::kTree});
    const cli::RankReport ring = problem.Decode(setup, {.schedule = Schedule::kRingKv});
    const auto shard = static_cast<std::size_t>(kTokens / c.ranks * 2 * (64 + 64) * 2);
    for (int r = 0; r < c.ranks; ++r) {
      const std::size_t of_tree = tree.peak_bytes[Index(r)];
      const std::size_t of_ring = ring.peak_bytes[Index(r)];
      EXPECT_GT(of_tree, shard);
      EXPECT_LE(static_cast<double>(of_tree), c.most * static_cast<double>(of_ring))
          << "rank " << r << " of " << c.ranks << ": " << of_tree << " and " << of_ring;
    }
  }
}

double MaxOverMeanPairs(Dealing dealing, Schedule schedule) {
  constexpr int kRanks = 8;
  constexpr std::int64_t kTokens = 8192;
  Batch batch{.spec = SpecOf(1, 1, 8, 8), .sequences = {{kTokens, kTokens}}};
  batch.spec.causal = true;
  const std::vector<std::int64_t> pairs = CountPrefill(batch, dealing, kRanks, schedule).pairs;
  const std::int64_t sum = std::accumulate(pairs.begin(), pairs.end(), std::int64_t{0});
  EXPECT_EQ(sum, kTokens * (kTokens + 1) / 2);
  return static_cast<double>(*std::max_element(pairs.begin(), pairs.end())) * kRanks /
         static_cast<double>(sum);
}

TEST(ClaimsTest, StripedAndZigzagBalanceCausalPrefill) {
  for (const Schedule schedule : {Schedule::kRingKv, Schedule::kRingQ}) {
    EXPECT_LE(MaxOverMeanPairs(Dealing::kStriped, schedule), 1.01);
    EXPECT_LE(MaxOverMeanPairs(Dealing::kZigzag, schedule), 1.01);
    const double contiguous = MaxOverMeanPairs(Dealing::kContiguous, schedule);
    EXPECT_GE(contiguous, 1.8);
    EXPECT_LE(contiguous, 2.0);
  }
}

}  // namespace
}  // namespace treeline::test
