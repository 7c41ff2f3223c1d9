// What caches hold: which positions and which rows.

#include "treeline/kv_cache.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cache/kv_testing.h"

namespace treeline {
namespace {

using test::DecodedRow;
using test::Extend;
using test::Group;
using test::Holds;
using test::kKey;
using test::kValue;
using test::Row;
using test::Side;
using test::SmallOptions;
using test::Stamps;
using test::WriteSlots;

TEST(KvCacheTest, StartsEmpty) {
  KvCache cache(SmallOptions());
  EXPECT_EQ(cache.used_pages(), 0);
  EXPECT_EQ(cache.free_pages(), 1000);
  const SequenceId id = cache.Add();
  EXPECT_NE(id, SequenceId{});
  EXPECT_EQ(cache.length(id), 0);
  EXPECT_EQ(cache.positions(id).count(), 0);
  EXPECT_EQ(cache.View(id, 1).slots, 0);
  EXPECT_EQ(cache.Grow(id, 0), (SlotRange{0, 0}));
  cache.Truncate(id, 0);
  EXPECT_TRUE(Holds(cache, cache.Fork(id), {}));
  cache.Write(id, 0, {0, 0}, TensorView::Dense(nullptr, DType::kF32, 0, 2, 8),
              TensorView::Dense(nullptr, DType::kF32, 0, 2, 16));
  EXPECT_EQ(cache.used_pages(), 0);
}

// The definition, position by position: every one on one rank, in order, on the rank it should be.
void ExpectPartition(const std::deque<KvCache>& group, SequenceId id) {
  const KvCacheOptions& options = group[0].options();
  const std::int64_t length = group[0].length(id);
  std::vector<int> owners(static_cast<std::size_t>(length), -1);
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  std::int64_t most = 0;
  for (const KvCache& cache : group) {
    const Positions positions = cache.positions(id);
    ASSERT_EQ(cache.length(id), length);
    ASSERT_EQ(cache.first_rank(id), group[0].first_rank(id));
    ASSERT_EQ(cache.View(id, 0).slots, positions.count());
    least = std::min(least, positions.count());
    most = std::max(most, positions.count());
    for (std::int64_t slot = 0; slot < positions.count(); ++slot) {
      ASSERT_TRUE(slot == 0 || positions[slot - 1] < positions[slot]);
      int& owner = owners.at(static_cast<std::size_t>(positions[slot]));
      ASSERT_EQ(owner, -1) << "position " << positions[slot] << " is on two ranks";
      owner = cache.options().rank;
    }
    const std::vector<Positions> shards = cache.shards(id);
    ASSERT_EQ(shards.size(), group.size());
    for (std::size_t rank = 0; rank < group.size(); ++rank) {
      const Positions there = group[rank].positions(id);
      ASSERT_EQ(shards[rank].count(), there.count());
      for (std::int64_t slot = 0; slot < there.count(); ++slot) {
        ASSERT_EQ(shards[rank][slot], there[slot]);
      }
    }
  }
  for (std::int64_t p = 0; p < length; ++p) {
    ASSERT_EQ(owners[static_cast<std::size_t>(p)],
              (group[0].first_rank(id) + p / options.run) % options.ranks);
  }
  EXPECT_LE(most - least, options.run);
}

TEST(KvCacheTest, RanksHoldEveryPositionOnceInBalance) {
  std::mt19937 random(1);
  for (int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64}) {
    for (std::int64_t run : {1, 3, 16}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, run " << run);
      KvCacheOptions options = SmallOptions();
      options.ranks = ranks;
      options.run = run;
      std::deque<KvCache> group = Group(options);
      for (int s = 0; s < 3; ++s) {
        const SequenceId id = group[0].Add();
        EXPECT_EQ(group[0].first_rank(id), s % ranks);
        for (std::size_t r = 1; r < group.size(); ++r) ASSERT_EQ(group[r].Add(), id);
        ExpectPartition(group, id);
        // 0 and 1 tokens first, then sizes that divide by nothing.
        for (std::int64_t tokens : {0, 1, 1, 5, static_cast<int>(random() % 98), 97}) {
          const std::int64_t before = group[0].length(id);
          for (KvCache& cache : group) {
            const std::int64_t had = cache.positions(id).count();
            const SlotRange gained = cache.Grow(id, tokens);
            ASSERT_EQ(gained, (SlotRange{had, cache.positions(id).count()}));
            ASSERT_TRUE(gained.size() == 0 || cache.positions(id)[gained.begin] >= before);
          }
          ExpectPartition(group, id);
        }
      }
    }
  }
}

RC_GTEST_PROP(KvCacheProperty, AppendsOfAnySizeKeepRanksInBalance, ()) {
  const auto uniform = [](int begin, int end) {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(begin, end));
  };
  KvCacheOptions options = SmallOptions();
  options.ranks = uniform(1, 65);
  options.run = uniform(1, 40);
  options.page_slots = 64;
  std::deque<KvCache> group = Group(options);
  const int first_rank = uniform(0, options.ranks);
  SequenceId id{};
  for (KvCache& cache : group) id = cache.Add(first_rank);
  std::int64_t length = 0;
  for (int tokens : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 300))) {
    length += tokens;
    std::vector<std::int64_t> counts;
    for (KvCache& cache : group) counts.push_back(cache.Grow(id, tokens).end);
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    RC_ASSERT(*most - *least <= options.run);
    RC_ASSERT(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == length);
  }
}

TEST(KvCacheTest, FirstRanksAreDealtOrGiven) {
  KvCacheOptions options = SmallOptions();
  options.ranks = 3;
  std::deque<KvCache> group = Group(options);
  for (KvCache& cache : group) {
    std::vector<int> first;
    for (int i = 0; i < 4; ++i) first.push_back(cache.first_rank(cache.Add()));
    const SequenceId given = cache.Add(2);
    first.push_back(cache.first_rank(given));
    first.push_back(cache.first_rank(cache.Fork(given)));
    first.push_back(cache.first_rank(cache.Add()));  // neither of the two took a turn
    EXPECT_EQ(first, (std::vector<int>{0, 1, 2, 0, 2, 2, 1}));
  }
}

// Every type from every type, over ranks and runs: what one rank would hold for the same positions.
TEST(KvCacheTest, RanksHoldWhatOneRankHolds) {
  struct Shape {
    int kv_heads, head_dim, v_head_dim;
    std::int64_t page_slots;
  };
  for (const Shape& shape : {Shape{2, 40, 8, 4}, Shape{1, 576, 512, 8}, Shape{3, 64, 64, 1}}) {
    for (DType dtype : kAllDTypes) {
      for (DType source : {DType::kF32, DType::kBF16, DType::kF16}) {
        KvCacheOptions options = SmallOptions();
        options.kv_heads = shape.kv_heads;
        options.head_dim = shape.head_dim;
        options.v_head_dim = shape.v_head_dim;
        options.page_slots = shape.page_slots;
        options.dtype = dtype;
        SCOPED_TRACE(testing::Message() << Name(dtype) << " from " << Name(source) << ", dims "
                                        << shape.head_dim << " and " << shape.v_head_dim);
        KvCache whole(options);
        const std::vector<std::int64_t> stamps = Stamps(7, 37);
        const SequenceId whole_id = whole.Add();
        Extend(whole, whole_id, stamps, source);
        ASSERT_TRUE(Holds(whole, whole_id, stamps));

        options.ranks = 3;
        options.run = source == DType::kF32 ? 1 : 3;
        for (KvCache& cache : Group(options)) {
          const SequenceId other = cache.Add();
          const SequenceId id = cache.Add();
          Extend(cache, other, Stamps(1000, 11), source);
          Extend(cache, id, Stamps(7, 20), source);
          Extend(cache, other, Stamps(1000, 30), source);
          Extend(cache, id, stamps, source);
          ASSERT_TRUE(Holds(cache, other, Stamps(1000, 30)));
          ASSERT_TRUE(Holds(cache, id, stamps));
          const Positions positions = cache.positions(id);
          for (int layer = 0; layer < options.layers; ++layer) {
            const KvView view = cache.View(id, layer);
            const KvView one = whole.View(whole_id, layer);
            for (std::int64_t slot = 0; slot < view.slots; ++slot) {
              for (int head = 0; head < options.kv_heads; ++head) {
                ASSERT_EQ(std::memcmp(view.KeyRow(slot, head), one.KeyRow(positions[slot], head),
                                      RowBytes(dtype, options.head_dim)),
                          0);
                ASSERT_EQ(
                    std::memcmp(view.ValueRow(slot, head), one.ValueRow(positions[slot], head),
                                RowBytes(dtype, options.v_head_dim)),
                    0);
              }
            }
          }
        }
      }
    }
  }
}

// Rounded once, from the f32 that the source means.
TEST(KvCacheTest, RowsAreRoundedAsEncodeRowDoes) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (DType dtype : kAllDTypes) {
    for (DType source : {DType::kF32, DType::kBF16, DType::kF16}) {
      KvCacheOptions options = SmallOptions();
      options.layers = options.kv_heads = 1;
      options.head_dim = options.v_head_dim = 72;
      options.dtype = dtype;
      std::vector<float> values(72);
      for (float& value : values) value = normal(random);
      values[3] = std::numeric_limits<float>::infinity();
      std::vector<std::byte> given(RowBytes(source, 72)), expected(RowBytes(dtype, 72));
      EncodeRow(source, values, given.data());
      DecodeRow(source, given.data(), values);
      EncodeRow(dtype, values, expected.data());
      KvCache cache(options);
      const SequenceId id = cache.Add();
      const auto row = TensorView::Dense(given.data(), source, 1, 1, 72);
      cache.Write(id, 0, cache.Grow(id, 1), row, row);
      EXPECT_EQ(std::memcmp(cache.View(id, 0).KeyRow(0, 0), expected.data(), expected.size()), 0);
      EXPECT_EQ(std::memcmp(cache.View(id, 0).ValueRow(0, 0), expected.data(), expected.size()), 0);
    }
  }
}

TEST(KvCacheTest, SourcesMayHaveAnyStrides) {
  const KvCacheOptions options = SmallOptions();
  KvCache cache(options);
  const SequenceId id = cache.Add();
  const std::vector<std::int64_t> stamps = Stamps(50, 6);
  cache.Grow(id, 6);
  for (int layer = 0; layer < 2; ++layer) {
    // K from [head, token, dim] with gaps of NaN, V from the last token to the first.
    std::vector<float> k(2 * 6 * 11, std::numeric_limits<float>::quiet_NaN());
    std::vector<float> v(6 * 2 * 16);
    for (std::size_t t = 0; t < 6; ++t) {
      for (std::size_t h = 0; h < 2; ++h) {
        std::ranges::copy(Row(options, stamps[t], layer, kKey, static_cast<int>(h)),
                          k.begin() + static_cast<std::ptrdiff_t>((h * 6 + t) * 11));
        std::ranges::copy(Row(options, stamps[t], layer, kValue, static_cast<int>(h)),
                          v.begin() + static_cast<std::ptrdiff_t>(((5 - t) * 2 + h) * 16));
      }
    }
    cache.Write(id, layer, {0, 6}, {k.data(), DType::kF32, 6, 2, 8, 11 * 4, 6 * 11 * 4},
                {v.data() + 5 * 2 * 16, DType::kF32, 6, 2, 16, -2 * 16 * 4, 16 * 4});
  }
  EXPECT_TRUE(Holds(cache, id, stamps));

  // One token for all slots and one row for all heads.
  const std::vector<float> row = Row(options, 99, 0, kValue, 0);
  cache.Write(id, 1, {1, 6}, {row.data(), DType::kF32, 5, 2, 8, 0, 0},
              {row.data(), DType::kF32, 5, 2, 16, 0, 0});
  for (std::int64_t slot = 1; slot < 6; ++slot) {
    for (int head : {0, 1}) EXPECT_EQ(DecodedRow(cache.View(id, 1), slot, head, kValue), row);
  }
  EXPECT_EQ(DecodedRow(cache.View(id, 1), 0, 1, kValue), Row(options, 50, 1, kValue, 1));
}

TEST(KvCacheTest, PagesAreCountedTrackedAndAligned) {
  for (DType dtype : kAllDTypes) {
    MemoryTracker tracker;
    {
      KvCacheOptions options = SmallOptions();
      options.dtype = dtype;
      options.kv_heads = 3;
      options.page_slots = 2;
      options.pages = 5;
      KvCache cache(options, &tracker);
      EXPECT_EQ(tracker.held(Purpose::kShard), 0u);
      // Blocks of whole cache lines, one for K and one for V in each layer.
      const auto block = [&](int dim) { return (3 * 2 * RowBytes(dtype, dim) + 63) / 64 * 64; };
      EXPECT_EQ(cache.bytes_per_page(), 2 * (block(8) + block(16)));
      const SequenceId id = cache.Add();
      cache.Grow(id, 7);
      EXPECT_EQ(cache.used_pages(), 4);
      EXPECT_EQ(cache.free_pages(), 1);
      EXPECT_EQ(tracker.held(Purpose::kShard), 4 * cache.bytes_per_page());
      for (int layer = 0; layer < 2; ++layer) {
        const KvView view = cache.View(id, layer);
        for (int page = 0; page < 4; ++page) {
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.k.pages[page]) % 64, 0u);
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.v.pages[page]) % 64, 0u);
        }
      }
      // Pages that were used once serve again.
      cache.Free(id);
      EXPECT_EQ(cache.used_pages(), 0);
      cache.Grow(cache.Add(), 10);
      EXPECT_EQ(tracker.peak(Purpose::kShard), 5 * cache.bytes_per_page());
    }
    EXPECT_EQ(tracker.held(Purpose::kShard), 0u);
  }
}

TEST(KvCacheTest, SlotsWithoutTokensArePoisonedInDebugBuilds) {
#ifdef NDEBUG
  GTEST_SKIP() << "a release build does not poison";
#endif
  for (DType dtype : kAllDTypes) {
    KvCacheOptions options = SmallOptions();
    options.dtype = dtype;
    options.pages = 2;  // so that every page is used again
    KvCache cache(options);
    const auto expect_poison = [&](SequenceId id, std::int64_t begin) {
      for (int layer = 0; layer < options.layers; ++layer) {
        const KvView view = cache.View(id, layer);
        for (std::int64_t slot = begin; slot < view.slots; ++slot) {
          for (int head = 0; head < options.kv_heads; ++head) {
            for (Side side : {kKey, kValue}) {
              for (float x : DecodedRow(view, slot, head, side)) ASSERT_TRUE(std::isnan(x));
            }
          }
        }
      }
    };
    SequenceId id = cache.Add();
    cache.Grow(id, 8);
    expect_poison(id, 0);
    WriteSlots(cache, id, {0, 8}, Stamps(1, 8));
    cache.Truncate(id, 6);
    cache.Grow(id, 2);
    expect_poison(id, 6);
    WriteSlots(cache, id, {0, 8}, Stamps(1, 8));
    cache.Truncate(id, 3);
    const SequenceId fork = cache.Fork(id);
    cache.Grow(fork, 1);
    EXPECT_TRUE(Holds(cache, id, Stamps(1, 3)));
    expect_poison(fork, 3);
    WriteSlots(cache, fork, {3, 4}, Stamps(1, 4));
    cache.Free(id);
    cache.Free(fork);
    id = cache.Add();
    cache.Grow(id, 8);
    expect_poison(id, 0);
  }
}

}  // namespace
}  // namespace treeline
