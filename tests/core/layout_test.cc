#include "treeline/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "treeline/errors.h"

namespace treeline {
namespace {

using ::testing::AllOf;
using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kInt64Min = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMaxPosition = kInt64Max / 4;

// Chunk c of `chunks` covers [ChunkStart(c), ChunkStart(c + 1)).
std::int64_t ChunkStart(std::int64_t tokens, std::int64_t chunks, std::int64_t c) {
  return c * tokens / chunks;
}

std::vector<std::int64_t> AllPositions(const Positions& positions) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(positions.count()));
  positions.Fill(0, all);
  return all;
}

std::vector<std::int64_t> Counts(const Layout& layout) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < layout.ranks(); ++rank) counts.push_back(layout.Shard(rank).count());
  return counts;
}

std::int64_t Imbalance(const Layout& layout) {
  const std::vector<std::int64_t> counts = Counts(layout);
  const auto [low, high] = std::minmax_element(counts.begin(), counts.end());
  return *high - *low;
}

// Slot `slot` and everything that says where it is agree.
AssertionResult SlotIsConsistent(const Positions& shard, std::int64_t slot) {
  const std::int64_t position = shard[slot];
  if (slot > 0 && shard[slot - 1] >= position) {
    return AssertionFailure() << "slot " << slot << " at " << position << " follows "
                              << shard[slot - 1];
  }
  if (shard.CountBelow(position) != slot || shard.CountBelow(position + 1) != slot + 1) {
    return AssertionFailure() << "slot " << slot << " at " << position << ": CountBelow says "
                              << shard.CountBelow(position) << " and "
                              << shard.CountBelow(position + 1);
  }
  std::int64_t filled = -1;
  shard.Fill(slot, {&filled, 1});
  if (filled != position) {
    return AssertionFailure() << "slot " << slot << ": Fill says " << filled << ", not "
                              << position;
  }
  return AssertionSuccess();
}

AssertionResult EndsAreConsistent(const Positions& shard) {
  for (std::int64_t below : {kInt64Min, std::int64_t{-1}, std::int64_t{0}}) {
    if (shard.CountBelow(below) != 0) return AssertionFailure() << "slots below " << below;
  }
  if (shard.CountBelow(kInt64Max) != shard.count()) {
    return AssertionFailure() << shard.CountBelow(kInt64Max) << " slots of " << shard.count();
  }
  return AssertionSuccess();
}

// Every slot of every rank. As Owner is a function, shards that agree with it cannot share a
// position, and counts that sum to the length leave none out.
AssertionResult IsPartition(const Layout& layout) {
  std::int64_t total = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const Positions shard = layout.Shard(rank);
    total += shard.count();
    if (const auto ends = EndsAreConsistent(shard); !ends) return ends;
    const std::vector<std::int64_t> all = AllPositions(shard);
    for (std::int64_t slot = 0; slot < shard.count(); ++slot) {
      const std::int64_t position = shard[slot];
      if (all[static_cast<std::size_t>(slot)] != position) {
        return AssertionFailure() << "Fill and operator[] differ in slot " << slot;
      }
      if (position < 0 || position >= layout.tokens() || layout.Owner(position) != rank) {
        return AssertionFailure() << "rank " << rank << " of " << layout.ranks() << " has position "
                                  << position << " of " << layout.tokens();
      }
      if (const auto same = SlotIsConsistent(shard, slot); !same) return same;
    }
  }
  if (total != layout.tokens()) {
    return AssertionFailure() << total << " slots for " << layout.tokens() << " tokens";
  }
  return AssertionSuccess();
}

const std::vector<std::vector<int>>& SomeWeights() {
  static const std::vector<std::vector<int>> weights{
      {1}, {1, 1}, {3, 1}, {1, 2, 3}, {0, 1}, {2, 0, 1}, {0, 0, 5, 0}, {4, 1, 0, 7, 2}};
  return weights;
}

TEST(LayoutTest, EveryPositionHasOneOwnerForAllSmallSizes) {
  for (std::int64_t tokens = 0; tokens <= 40; ++tokens) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << ranks << " ranks");
      EXPECT_TRUE(IsPartition(Layout::Contiguous(tokens, ranks)));
      EXPECT_TRUE(IsPartition(Layout::Zigzag(tokens, ranks)));
      for (std::int64_t run : {1, 2, 3, 7, 50}) {
        for (int first_rank = 0; first_rank < ranks; ++first_rank) {
          EXPECT_TRUE(IsPartition(Layout::Striped(tokens, ranks, run, first_rank)))
              << "run " << run << " from rank " << first_rank;
        }
      }
    }
    for (const std::vector<int>& weights : SomeWeights()) {
      for (std::int64_t run : {1, 3}) {
        EXPECT_TRUE(IsPartition(Layout::Weighted(tokens, weights, run)))
            << tokens << " tokens, weights " << ::testing::PrintToString(weights);
      }
    }
  }
}

TEST(LayoutTest, ChunksAreFloorsOfEqualShares) {
  for (std::int64_t tokens = 0; tokens <= 50; ++tokens) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (int r = 0; r < ranks; ++r) {
        SCOPED_TRACE(::testing::Message() << tokens << " tokens, rank " << r << " of " << ranks);
        const auto chunk = [&](std::int64_t chunks, std::int64_t c) {
          std::vector<std::int64_t> positions(static_cast<std::size_t>(
              ChunkStart(tokens, chunks, c + 1) - ChunkStart(tokens, chunks, c)));
          std::iota(positions.begin(), positions.end(), ChunkStart(tokens, chunks, c));
          return positions;
        };
        EXPECT_EQ(AllPositions(Layout::Contiguous(tokens, ranks).Shard(r)), chunk(ranks, r));

        std::vector<std::int64_t> both = chunk(2 * ranks, r);
        const std::vector<std::int64_t> mirrored = chunk(2 * ranks, 2 * ranks - 1 - r);
        both.insert(both.end(), mirrored.begin(), mirrored.end());
        EXPECT_EQ(AllPositions(Layout::Zigzag(tokens, ranks).Shard(r)), both);
      }
    }
  }
}

TEST(LayoutTest, StripedSlotsFollowTheFormula) {
  for (std::int64_t tokens = 0; tokens <= 60; ++tokens) {
    for (int ranks = 1; ranks <= 7; ++ranks) {
      for (std::int64_t run : {1, 2, 5}) {
        const Layout layout = Layout::Striped(tokens, ranks, run);
        for (int r = 0; r < ranks; ++r) {
          const Positions shard = layout.Shard(r);
          std::vector<std::int64_t> expected;
          for (std::int64_t i = 0;; ++i) {
            const std::int64_t position = r * run + i / run * (ranks * run) + i % run;
            if (position >= tokens) break;
            expected.push_back(position);
          }
          EXPECT_EQ(AllPositions(shard), expected)
              << tokens << " tokens, rank " << r << " of " << ranks << ", run " << run;
        }
      }
    }
  }
}

TEST(LayoutTest, RunsStartOnTheFirstRank) {
  for (std::int64_t tokens : {0, 1, 2, 59, 60, 61}) {
    for (int ranks = 1; ranks <= 7; ++ranks) {
      for (std::int64_t run : {1, 3, 5}) {
        for (int first_rank = 0; first_rank < ranks; ++first_rank) {
          const Layout layout = Layout::Striped(tokens, ranks, run, first_rank);
          for (std::int64_t position = 0; position < tokens; ++position) {
            EXPECT_EQ(layout.Owner(position), (first_rank + position / run) % ranks)
                << position << " of " << tokens << ", " << ranks << " ranks, run " << run;
          }
          // A rotation renames ranks and changes nothing else.
          const Layout from_zero = Layout::Striped(tokens, ranks, run);
          for (int r = 0; r < ranks; ++r) {
            EXPECT_EQ(AllPositions(layout.Shard((first_rank + r) % ranks)),
                      AllPositions(from_zero.Shard(r)));
          }
        }
      }
    }
  }
}

TEST(LayoutTest, WeightedSharesAreExact) {
  for (const std::vector<int>& weights : SomeWeights()) {
    const std::int64_t sum = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    for (std::int64_t run : {1, 4}) {
      const std::int64_t rounds = 5;
      const Layout layout = Layout::Weighted(rounds * sum * run, weights, run);
      for (std::size_t r = 0; r < weights.size(); ++r) {
        const Positions shard = layout.Shard(static_cast<int>(r));
        for (std::int64_t round = 0; round < rounds; ++round) {
          EXPECT_EQ(shard.CountBelow((round + 1) * sum * run) - shard.CountBelow(round * sum * run),
                    weights[r] * run);
        }
      }
    }
  }
}

TEST(LayoutTest, WeightsOfOneAreStriped) {
  for (std::int64_t tokens : {0, 1, 17, 1000}) {
    const Layout weighted = Layout::Weighted(tokens, std::vector<int>{1, 1, 1}, 2);
    const Layout striped = Layout::Striped(tokens, 3, 2);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(AllPositions(weighted.Shard(r)), AllPositions(striped.Shard(r)));
    }
  }
}

TEST(LayoutTest, ZeroWeightHoldsNothing) {
  const Layout layout = Layout::Weighted(1000, std::vector<int>{0, 3, 0, 1, 0}, 7);
  for (int r : {0, 2, 4}) EXPECT_EQ(layout.Shard(r).count(), 0);
  EXPECT_EQ(layout.Shard(1).count() + layout.Shard(3).count(), 1000);
}

TEST(LayoutTest, MoreRanksThanTokensLeavesSomeEmpty) {
  for (const Layout& layout :
       {Layout::Contiguous(3, 10), Layout::Zigzag(3, 10), Layout::Striped(3, 10)}) {
    const std::vector<std::int64_t> counts = Counts(layout);
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), 3);
    EXPECT_GE(std::count(counts.begin(), counts.end(), 0), 7);
  }
}

TEST(LayoutTest, IsBalanced) {
  for (std::int64_t tokens : {0, 1, 2, 97, 1000, 4093}) {
    for (int ranks = 1; ranks <= 33; ++ranks) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << ranks << " ranks");
      EXPECT_LE(Imbalance(Layout::Contiguous(tokens, ranks)), 1);
      EXPECT_LE(Imbalance(Layout::Zigzag(tokens, ranks)), 2);
      for (std::int64_t run : {1, 16, 100}) {
        EXPECT_LE(Imbalance(Layout::Striped(tokens, ranks, run)), run);
      }
    }
  }
}

TEST(LayoutTest, TellsWhatItIs) {
  EXPECT_EQ(Layout::Contiguous(5, 2).kind(), LayoutKind::kContiguous);
  EXPECT_EQ(Layout::Zigzag(5, 2).kind(), LayoutKind::kZigzag);
  EXPECT_EQ(Layout::Striped(5, 2).kind(), LayoutKind::kStriped);
  const Layout weighted = Layout::Weighted(5, std::vector<int>{0, 2, 0});
  EXPECT_EQ(weighted.kind(), LayoutKind::kStriped);
  EXPECT_EQ(weighted.tokens(), 5);
  EXPECT_EQ(weighted.ranks(), 3);
  EXPECT_EQ(Name(LayoutKind::kContiguous), "contiguous");
  EXPECT_EQ(Name(LayoutKind::kStriped), "striped");
  EXPECT_EQ(Name(LayoutKind::kZigzag), "zigzag");
}

// Uniform from the first case on, where rapidcheck would begin with small numbers only.
template <class T>
T Uniform(T begin, T end) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(begin, end));
}

// A layout of any kind. Lengths of every magnitude up to 2^max_bits.
Layout AnyLayout(int max_bits, int max_ranks) {
  const int bits = Uniform(0, max_bits + 1);
  const auto tokens = Uniform<std::int64_t>(0, (std::int64_t{1} << bits) + 1);
  const int ranks = Uniform(1, max_ranks + 1);
  const auto run = *rc::gen::inRange<std::int64_t>(1, 200);
  switch (Uniform(0, 4)) {
    case 0:
      return Layout::Contiguous(tokens, ranks);
    case 1:
      return Layout::Zigzag(tokens, ranks);
    case 2:
      return Layout::Striped(tokens, ranks, run, Uniform(0, ranks));
    default:
      break;
  }
  auto weights = *rc::gen::container<std::vector<int>>(static_cast<std::size_t>(ranks),
                                                       rc::gen::inRange(0, 9));
  weights[Uniform<std::size_t>(0, weights.size())] += 1;
  return Layout::Weighted(tokens, weights, run);
}

RC_GTEST_PROP(LayoutProperty, ShardsAndOwnersAgreeAtAnyLength, ()) {
  const Layout layout = AnyLayout(40, 300);
  std::int64_t total = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const Positions shard = layout.Shard(rank);
    total += shard.count();
    RC_ASSERT(bool(EndsAreConsistent(shard)));
    if (shard.count() == 0) continue;
    const auto middle = Uniform<std::int64_t>(0, shard.count());
    for (std::int64_t slot : {std::int64_t{0}, middle, shard.count() - 1}) {
      RC_ASSERT(bool(SlotIsConsistent(shard, slot)));
      RC_ASSERT(shard[slot] < layout.tokens());
      RC_ASSERT(layout.Owner(shard[slot]) == rank);
    }
  }
  RC_ASSERT(total == layout.tokens());
  if (layout.tokens() == 0) return;
  const auto position = Uniform<std::int64_t>(0, layout.tokens());
  const Positions shard = layout.Shard(layout.Owner(position));
  RC_ASSERT(shard.CountBelow(position) < shard.count());
  RC_ASSERT(shard[shard.CountBelow(position)] == position);
}

RC_GTEST_PROP(LayoutProperty, SmallLayoutsArePartitions, ()) {
  const Layout layout = AnyLayout(9, 40);
  const AssertionResult partition = IsPartition(layout);
  RC_LOG() << partition.message();
  RC_ASSERT(bool(partition));
}

RC_GTEST_PROP(LayoutProperty, LongChunksFollowTheFormula, ()) {
  const auto tokens = Uniform<std::int64_t>(1, kMaxTokens + 1);
  const int ranks = Uniform(1, (1 << 20) + 1);
  const int r = Uniform(0, ranks);
  const Positions contiguous = Layout::Contiguous(tokens, ranks).Shard(r);
  RC_ASSERT(contiguous.count() == ChunkStart(tokens, ranks, r + 1) - ChunkStart(tokens, ranks, r));
  if (contiguous.count() > 0) RC_ASSERT(contiguous[0] == ChunkStart(tokens, ranks, r));

  const std::int64_t chunks = 2 * std::int64_t{ranks};
  const std::int64_t mirrored = chunks - 1 - r;
  const Positions zigzag = Layout::Zigzag(tokens, ranks).Shard(r);
  const std::int64_t lower = ChunkStart(tokens, chunks, r + 1) - ChunkStart(tokens, chunks, r);
  const std::int64_t upper =
      ChunkStart(tokens, chunks, mirrored + 1) - ChunkStart(tokens, chunks, mirrored);
  RC_ASSERT(zigzag.count() == lower + upper);
  if (lower > 0) RC_ASSERT(zigzag[0] == ChunkStart(tokens, chunks, r));
  if (upper > 0) RC_ASSERT(zigzag[lower] == ChunkStart(tokens, chunks, mirrored));
}

TEST(LayoutTest, TheLargestSizesDoNotOverflow) {
  constexpr int kMaxRanks = 1 << 20;
  for (std::int64_t tokens : {kMaxTokens, kMaxTokens - 1}) {
    for (const Layout& layout :
         {Layout::Contiguous(tokens, kMaxRanks), Layout::Zigzag(tokens, kMaxRanks),
          Layout::Striped(tokens, kMaxRanks), Layout::Striped(tokens, kMaxRanks, 1 << 20),
          Layout::Striped(tokens, kMaxRanks, 1 << 20, kMaxRanks - 1),
          Layout::Striped(tokens, 1, 1 << 20)}) {
      for (int rank : {0, layout.ranks() / 2, layout.ranks() - 1}) {
        const Positions shard = layout.Shard(rank);
        ASSERT_GT(shard.count(), 0);
        for (std::int64_t slot : {std::int64_t{0}, shard.count() - 1}) {
          EXPECT_TRUE(SlotIsConsistent(shard, slot));
          EXPECT_EQ(layout.Owner(shard[slot]), rank);
        }
      }
      const Positions last = layout.Shard(layout.Owner(tokens - 1));
      EXPECT_EQ(last[last.count() - 1], tokens - 1);
    }
  }
}

TEST(LayoutTest, BadArgumentsAreNamed) {
  const std::vector<int> negative{1, -2}, zero{0, 0}, none, heavy{1 << 20, 1};
  const auto message = [](const char* text) {
    return ThrowsMessage<ArgumentError>(HasSubstr(text));
  };
  EXPECT_THAT([] { Layout::Contiguous(-1, 2); }, message("tokens is -1"));
  EXPECT_THAT([] { Layout::Striped(kMaxTokens + 1, 2); }, message("tokens is 1099511627777"));
  EXPECT_THAT([] { Layout::Zigzag(kInt64Max, 2); }, message("tokens is 9223372036854775807"));
  EXPECT_THAT([] { Layout::Contiguous(4, 0); }, message("ranks is 0"));
  EXPECT_THAT([] { Layout::Zigzag(4, -3); }, message("ranks is -3"));
  EXPECT_THAT([] { Layout::Striped(4, (1 << 20) + 1); }, message("ranks is 1048577"));
  EXPECT_THAT([] { Layout::Striped(4, 2, 0); }, message("run is 0"));
  EXPECT_THAT([] { Layout::Striped(4, 2, -5); }, message("run is -5"));
  EXPECT_THAT([] { Layout::Striped(4, 2, kInt64Max); }, message("run is 9223372036854775807"));
  EXPECT_THAT([] { Layout::Striped(4, 2, 1, -1); }, message("first_rank is -1"));
  EXPECT_THAT([] { Layout::Striped(4, 2, 1, 2); },
              message("first_rank is 2; it must be from 0 to 1"));
  EXPECT_THAT([&] { Layout::Weighted(4, negative); }, message("weights[1] is -2"));
  EXPECT_THAT([&] { Layout::Weighted(4, zero); }, message("weights sum to 0"));
  EXPECT_THAT([&] { Layout::Weighted(4, none); }, message("weights sum to 0"));
  EXPECT_THAT([&] { Layout::Weighted(4, heavy); }, message("weights sum to 1048577"));
  EXPECT_THAT([] { Name(static_cast<LayoutKind>(9)); }, message("layout 9"));

  for (const Layout& layout :
       {Layout::Contiguous(5, 3), Layout::Zigzag(5, 3), Layout::Striped(5, 3)}) {
    EXPECT_THAT([&] { layout.Shard(-1); }, message("rank is -1"));
    EXPECT_THAT([&] { layout.Shard(3); }, message("rank is 3"));
    EXPECT_THAT([&] { layout.Owner(-1); }, message("position is -1"));
    EXPECT_THAT([&] { layout.Owner(5); }, message("position is 5"));
  }
  EXPECT_THAT([] { Layout::Contiguous(0, 3).Owner(0); }, message("position is 0"));
}

TEST(PositionsTest, NoneAtAll) {
  const Positions none;
  EXPECT_EQ(none.count(), 0);
  EXPECT_TRUE(EndsAreConsistent(none));
  EXPECT_TRUE(EndsAreConsistent(Positions::Contiguous(7, 0)));
}

TEST(PositionsTest, JoinedKeepsTheOrderOfItsSegments) {
  const Positions joined = Positions::Joined({.first = 3, .run = 2, .stride = 5, .count = 5},
                                             {.first = 14, .run = 1, .stride = 3, .count = 2});
  EXPECT_EQ(AllPositions(joined), (std::vector<std::int64_t>{3, 4, 8, 9, 13, 14, 17}));
  const Positions tail_only =
      Positions::Joined({}, {.first = 2, .run = 1, .stride = 4, .count = 2});
  EXPECT_EQ(AllPositions(tail_only), (std::vector<std::int64_t>{2, 6}));
  std::vector<std::int64_t> inner(4);
  joined.Fill(2, inner);
  EXPECT_EQ(inner, (std::vector<std::int64_t>{8, 9, 13, 14}));
}

RC_GTEST_PROP(PositionsProperty, CountBelowCountsAnySegments, ()) {
  const auto segment = [](std::int64_t least) {
    Positions::Segment s;
    s.first = least + *rc::gen::inRange<std::int64_t>(0, 20);
    s.run = *rc::gen::inRange<std::int64_t>(1, 9);
    s.stride = s.run + *rc::gen::inRange<std::int64_t>(0, 9);
    s.count = *rc::gen::inRange<std::int64_t>(0, 40);
    return s;
  };
  const Positions::Segment head = segment(0);
  const Positions alone = Positions::Strided(head);
  const Positions::Segment tail = segment(head.count == 0 ? 0 : alone[head.count - 1] + 1);
  const Positions positions = Positions::Joined(head, tail);
  const std::vector<std::int64_t> all = AllPositions(positions);
  RC_ASSERT(std::is_sorted(all.begin(), all.end(), std::less_equal<>()));
  const std::int64_t last = all.empty() ? 0 : all.back();
  for (std::int64_t position = -2; position <= last + 2; ++position) {
    const auto below = std::lower_bound(all.begin(), all.end(), position) - all.begin();
    RC_ASSERT(positions.CountBelow(position) == below);
  }
}

TEST(PositionsTest, BadSegmentsAreNamed) {
  const auto message = [](const char* text) {
    return ThrowsMessage<ArgumentError>(HasSubstr(text));
  };
  EXPECT_THAT([] { Positions::Contiguous(-4, 2); }, message("first position is -4"));
  EXPECT_THAT([] { Positions::Contiguous(kMaxPosition + 1, 0); },
              message("first position is 2305843009213693952"));
  EXPECT_THAT([] { Positions::Contiguous(0, -2); }, message("count is -2"));
  EXPECT_THAT([] { Positions::Contiguous(0, kInt64Max); }, message("9223372036854775807 slots"));
  EXPECT_THAT([] { Positions::Contiguous(kMaxPosition - 1, 2); },
              message("2 slots from position 2305843009213693950"));
  EXPECT_THAT([] { Positions::Strided({.first = 0, .run = 0, .stride = 1, .count = 1}); },
              message("run is 0"));
  EXPECT_THAT([] { Positions::Strided({.first = 0, .run = 3, .stride = 2, .count = 1}); },
              message("stride is 2"));
  EXPECT_THAT([] { Positions::Strided({.first = 0, .run = 1, .stride = -6, .count = 1}); },
              message("stride is -6"));
  EXPECT_THAT([] { Positions::Strided({.first = 0, .run = 1, .stride = kInt64Max, .count = 3}); },
              message("9223372036854775807 apart"));
  EXPECT_THAT([] { Positions::Strided({.first = 0, .run = 1, .stride = 4, .count = kInt64Max}); },
              message("9223372036854775807 slots"));
  const Positions::Segment head{.first = 3, .run = 1, .stride = 4, .count = 3};  // ends at 11
  for (std::int64_t first : {11, 4, 0}) {
    const Positions::Segment tail{.first = first, .run = 1, .stride = 1, .count = 1};
    EXPECT_THAT([&] { Positions::Joined(head, tail); },
                ThrowsMessage<ArgumentError>(AllOf(HasSubstr("position " + std::to_string(first)),
                                                   HasSubstr("position 11"))));
  }
}

TEST(PositionsTest, TheLastPositionIsInRange) {
  const Positions last = Positions::Contiguous(kMaxPosition - 3, 3);
  EXPECT_EQ(last[2], kMaxPosition - 1);
  for (std::int64_t slot = 0; slot < 3; ++slot) EXPECT_TRUE(SlotIsConsistent(last, slot));
  EXPECT_TRUE(EndsAreConsistent(last));
}

bool Sees(const AttentionSpec& spec, std::int64_t query, std::int64_t key) {
  if (spec.causal && key > query) return false;
  return spec.window == 0 || std::abs(query - key) < spec.window;
}

// Exactly the slots in Visible() are seen.
AssertionResult VisibleIsRight(const AttentionSpec& spec, std::int64_t query,
                               const Positions& keys) {
  const SlotRange range = Visible(spec, query, keys);
  if (range.begin < 0 || range.begin > range.end || range.end > keys.count()) {
    return AssertionFailure() << "slots [" << range.begin << ", " << range.end << ") of "
                              << keys.count();
  }
  for (std::int64_t slot = 0; slot < keys.count(); ++slot) {
    const bool in_range = range.begin <= slot && slot < range.end;
    if (in_range != Sees(spec, query, keys[slot])) {
      return AssertionFailure() << "query " << query << ", key " << keys[slot] << ", window "
                                << spec.window << (spec.causal ? ", causal" : "") << ": slots ["
                                << range.begin << ", " << range.end << ")";
    }
  }
  return AssertionSuccess();
}

TEST(VisibleTest, MatchesTheDefinitionForAllSmallSizes) {
  AttentionSpec spec = AttentionSpec::Make(1, 1, 8);
  for (bool causal : {false, true}) {
    spec.causal = causal;
    for (std::int64_t window : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{5},
                                std::int64_t{13}, std::int64_t{100}, kMaxPosition, kInt64Max}) {
      spec.window = window;
      for (std::int64_t tokens = 0; tokens <= 12; ++tokens) {
        for (const Layout& layout : {Layout::Contiguous(tokens, 3), Layout::Zigzag(tokens, 3),
                                     Layout::Striped(tokens, 3), Layout::Striped(tokens, 2, 3)}) {
          for (int rank = 0; rank < layout.ranks(); ++rank) {
            for (std::int64_t query = 0; query <= tokens + 2; ++query) {
              EXPECT_TRUE(VisibleIsRight(spec, query, layout.Shard(rank)));
            }
          }
        }
      }
    }
  }
}

RC_GTEST_PROP(VisibleProperty, MatchesTheDefinition, (bool causal)) {
  AttentionSpec spec = AttentionSpec::Make(1, 1, 8);
  spec.causal = causal;
  spec.window = *rc::gen::oneOf(rc::gen::inRange<std::int64_t>(0, 1500),
                                rc::gen::element<std::int64_t>(0, kMaxPosition, kInt64Max));
  const Layout layout = AnyLayout(10, 8);
  const auto query = Uniform<std::int64_t>(0, layout.tokens() + 20);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const AssertionResult right = VisibleIsRight(spec, query, layout.Shard(rank));
    RC_LOG() << right.message();
    RC_ASSERT(bool(right));
  }
}

TEST(VisibleTest, AnUnboundedWindowHidesNothingFromTheLastPosition) {
  AttentionSpec spec = AttentionSpec::Make(1, 1, 8);
  spec.window = kInt64Max;
  const Positions ends =
      Positions::Joined({.first = 0, .run = 1, .stride = 1, .count = 1},
                        {.first = kMaxPosition - 1, .run = 1, .stride = 1, .count = 1});
  for (bool causal : {false, true}) {
    spec.causal = causal;
    EXPECT_EQ(Visible(spec, kMaxPosition - 1, ends), (SlotRange{0, 2}));
    EXPECT_EQ(Visible(spec, 0, ends), (SlotRange{0, causal ? 1 : 2}));
  }
}

}  // namespace
}  // namespace treeline
