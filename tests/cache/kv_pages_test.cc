// How sequences share, return and run out of pages, and what a cache refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "cache/kv_testing.h"
#include "treeline/errors.h"
#include "treeline/kv_cache.h"

namespace treeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using test::Extend;
using test::Group;
using test::Holds;
using test::SmallOptions;
using test::Stamps;
using test::WriteLayer;
using test::WriteSlots;

constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kInt64Min = std::numeric_limits<std::int64_t>::min();

// What a full cache says.
auto Full(std::int64_t needed, std::int64_t free, std::int64_t pages) {
  return ThrowsMessage<ArgumentError>(
      AllOf(HasSubstr("needs " + std::to_string(needed) + " more pages"),
            HasSubstr(std::to_string(free) + " of " + std::to_string(pages) + " are free")));
}

auto Says(const std::string& text) { return ThrowsMessage<ArgumentError>(HasSubstr(text)); }

TEST(KvPagesTest, ForksShareUntilTheyDiverge) {
  KvCache cache(SmallOptions());
  const SequenceId parent = cache.Add();
  std::vector<std::int64_t> tokens = Stamps(1, 10);  // two full pages and a half
  Extend(cache, parent, tokens);
  const SequenceId child = cache.Fork(parent);
  EXPECT_NE(child, parent);
  EXPECT_EQ(cache.used_pages(), 3);
  EXPECT_TRUE(Holds(cache, child, tokens));
  const std::vector<const void*> addresses(cache.View(parent, 1).v.pages,
                                           cache.View(parent, 1).v.pages + 3);

  // Growing into the shared page copies that page and no other.
  std::vector<std::int64_t> childs = tokens;
  childs.push_back(100);
  EXPECT_EQ(cache.PagesToGrow(child, 1), 1);
  Extend(cache, child, childs);
  EXPECT_EQ(cache.used_pages(), 4);
  EXPECT_TRUE(Holds(cache, parent, tokens));
  EXPECT_TRUE(Holds(cache, child, childs));
  EXPECT_EQ(cache.View(child, 1).v.pages[1], addresses[1]);
  EXPECT_NE(cache.View(child, 1).v.pages[2], addresses[2]);

  // The parent has its last page to itself now.
  EXPECT_EQ(cache.PagesToGrow(parent, 2), 0);
  tokens.insert(tokens.end(), {200, 201});
  Extend(cache, parent, tokens);
  EXPECT_EQ(cache.used_pages(), 4);

  // Writing into a shared page copies it as well, with all layers, for whoever writes.
  childs[5] = 300;
  WriteLayer(cache, child, 1, {5, 6}, {300});
  EXPECT_EQ(cache.used_pages(), 5);
  EXPECT_TRUE(Holds(cache, parent, tokens));
  WriteLayer(cache, child, 0, {5, 6}, {300});
  EXPECT_EQ(cache.used_pages(), 5);
  EXPECT_TRUE(Holds(cache, parent, tokens));
  EXPECT_TRUE(Holds(cache, child, childs));
  EXPECT_TRUE(
      std::equal(addresses.begin(), addresses.end(), cache.View(parent, 1).v.pages));  // untouched

  // What the fork still shares outlives the parent.
  cache.Free(parent);
  EXPECT_EQ(cache.used_pages(), 3);
  EXPECT_TRUE(Holds(cache, child, childs));
  cache.Free(child);
  EXPECT_EQ(cache.used_pages(), 0);
}

TEST(KvPagesTest, AForkOfFullPagesGrowsWithoutACopy) {
  KvCache cache(SmallOptions());
  const SequenceId parent = cache.Add();
  Extend(cache, parent, Stamps(1, 8));
  const SequenceId child = cache.Fork(cache.Fork(parent));
  Extend(cache, child, Stamps(1, 9));
  EXPECT_EQ(cache.used_pages(), 3);
  EXPECT_TRUE(Holds(cache, parent, Stamps(1, 8)));
  EXPECT_TRUE(Holds(cache, child, Stamps(1, 9)));
}

// Growing takes all the pages that writing the new slots needs.
TEST(KvPagesTest, GrownSlotsCanBeWrittenInAFullCache) {
  KvCacheOptions options = SmallOptions();
  options.pages = 3;
  KvCache cache(options);
  const SequenceId parent = cache.Add();
  Extend(cache, parent, Stamps(1, 3));
  const SequenceId child = cache.Fork(parent);
  const SlotRange gained = cache.Grow(child, 1);
  EXPECT_EQ(cache.used_pages(), 2);
  Extend(cache, cache.Add(), Stamps(50, 4));
  EXPECT_EQ(cache.free_pages(), 0);
  WriteSlots(cache, child, gained, Stamps(1, 4));
  EXPECT_TRUE(Holds(cache, parent, Stamps(1, 3)));
  EXPECT_TRUE(Holds(cache, child, Stamps(1, 4)));
}

TEST(KvPagesTest, TruncatedSequencesGrowAgain) {
  for (int ranks : {1, 3}) {
    KvCacheOptions options = SmallOptions();
    options.ranks = ranks;
    options.run = 3;
    for (KvCache& cache : Group(options)) {
      const SequenceId id = cache.Add(ranks - 1);
      std::vector<std::int64_t> tokens = Stamps(1, 50);
      Extend(cache, id, tokens);
      for (std::size_t length : {50, 49, 33, 32, 16, 5, 1, 0}) {
        tokens.resize(length);
        cache.Truncate(id, static_cast<std::int64_t>(length));
        ASSERT_TRUE(Holds(cache, id, tokens));
        ASSERT_EQ(cache.used_pages(), (cache.positions(id).count() + 3) / 4);
        const std::vector<std::int64_t> more = Stamps(1000 + static_cast<int>(length), 7);
        tokens.insert(tokens.end(), more.begin(), more.end());
        Extend(cache, id, tokens);
        ASSERT_TRUE(Holds(cache, id, tokens));
      }
    }
  }
}

TEST(KvPagesTest, TruncatingAForkLeavesTheOtherWhole) {
  KvCache cache(SmallOptions());
  const SequenceId parent = cache.Add();
  Extend(cache, parent, Stamps(1, 11));
  const SequenceId child = cache.Fork(parent);
  cache.Truncate(child, 6);
  EXPECT_EQ(cache.used_pages(), 3);  // the second page is still shared
  EXPECT_TRUE(Holds(cache, parent, Stamps(1, 11)));
  std::vector<std::int64_t> tokens = Stamps(1, 6);
  tokens.push_back(77);
  EXPECT_EQ(cache.PagesToGrow(child, 1), 1);
  Extend(cache, child, tokens);
  EXPECT_EQ(cache.used_pages(), 4);
  EXPECT_TRUE(Holds(cache, parent, Stamps(1, 11)));
  EXPECT_TRUE(Holds(cache, child, tokens));
}

TEST(KvPagesTest, AFullCacheSaysSoAndChangesNothing) {
  KvCacheOptions options = SmallOptions();
  options.pages = 4;
  KvCache cache(options);
  const SequenceId a = cache.Add();
  const SequenceId b = cache.Add();
  Extend(cache, a, Stamps(1, 6));
  Extend(cache, b, Stamps(100, 4));
  const auto unchanged = [&] {
    EXPECT_EQ(cache.used_pages(), 3);
    EXPECT_EQ(cache.free_pages(), 1);
    EXPECT_TRUE(Holds(cache, a, Stamps(1, 6)));
    EXPECT_TRUE(Holds(cache, b, Stamps(100, 4)));
  };
  EXPECT_EQ(cache.PagesToGrow(a, 7), 2);
  EXPECT_THAT([&] { cache.Grow(a, 7); }, Full(2, 1, 4));
  EXPECT_THAT([&] { cache.Grow(b, std::int64_t{1} << 39); }, Full(std::int64_t{1} << 37, 1, 4));
  unchanged();
  EXPECT_EQ(cache.Grow(a, 2), (SlotRange{6, 8}));  // the last page had room
  cache.Truncate(a, 6);

  // Copies need pages too.
  const SequenceId fork = cache.Fork(a);
  EXPECT_EQ(cache.PagesToGrow(fork, 3), 2);
  EXPECT_THAT([&] { cache.Grow(fork, 3); }, Full(2, 1, 4));
  EXPECT_THAT([&] { WriteLayer(cache, fork, 0, {3, 5}, {200, 201}); }, Full(2, 1, 4));
  unchanged();
  EXPECT_TRUE(Holds(cache, fork, Stamps(1, 6)));

  cache.Free(b);
  std::vector<std::int64_t> tokens = Stamps(1, 6);
  tokens.insert(tokens.end(), {300, 301, 302});
  Extend(cache, fork, tokens);
  EXPECT_EQ(cache.free_pages(), 0);
  EXPECT_TRUE(Holds(cache, a, Stamps(1, 6)));
  EXPECT_TRUE(Holds(cache, fork, tokens));
}

TEST(KvPagesTest, MemoryThatTheSystemRefusesChangesNothing) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer ends the program instead of throwing";
#endif
  KvCacheOptions options = SmallOptions();
  options.layers = 1 << 12;
  options.kv_heads = 1 << 16;
  options.page_slots = 1 << 20;
  options.pages = 2;
  KvCache cache(options);
  const SequenceId id = cache.Add();
  EXPECT_THROW(cache.Grow(id, 1), std::bad_alloc);
  EXPECT_EQ(cache.length(id), 0);
  EXPECT_EQ(cache.used_pages(), 0);
  EXPECT_EQ(cache.Grow(id, 0), (SlotRange{0, 0}));
}

TEST(KvPagesTest, BadOptionsAreNamed) {
  const auto with = [](auto change) {
    return [change] {
      KvCacheOptions options = SmallOptions();
      change(options);
      KvCache cache(options);
    };
  };
  using Options = KvCacheOptions;
  EXPECT_THAT(with([](Options& o) { o.ranks = 0; }), Says("ranks is 0"));
  EXPECT_THAT(with([](Options& o) { o.ranks = (1 << 20) + 1; }), Says("ranks is 1048577"));
  EXPECT_THAT(with([](Options& o) { o.rank = -1; }), Says("rank is -1; it must be from 0 to 0"));
  EXPECT_THAT(with([](Options& o) { o.rank = o.ranks = 3; }), Says("rank is 3"));
  EXPECT_THAT(with([](Options& o) { o.layers = 0; }), Says("layers is 0"));
  EXPECT_THAT(with([](Options& o) { o.layers = 4097; }), Says("it must be from 1 to 4096"));
  EXPECT_THAT(with([](Options& o) { o.kv_heads = 0; }), Says("kv_heads is 0"));
  EXPECT_THAT(with([](Options& o) { o.kv_heads = 65537; }), Says("kv_heads is 65537"));
  EXPECT_THAT(with([](Options& o) { o.head_dim = 0; }), Says("head_dim is 0"));
  EXPECT_THAT(with([](Options& o) { o.head_dim = 12; }), Says("head_dim is 12"));
  EXPECT_THAT(with([](Options& o) { o.v_head_dim = 584; }), Says("v_head_dim is 584"));
  EXPECT_THAT(with([](Options& o) { o.v_head_dim = -8; }), Says("v_head_dim is -8"));
  EXPECT_THAT(with([](Options& o) { o.dtype = static_cast<DType>(9); }), Says("dtype 9"));
  EXPECT_THAT(with([](Options& o) { o.run = 0; }), Says("run is 0"));
  EXPECT_THAT(with([](Options& o) { o.run = kInt64Max; }), Says("run is 9223372036854775807"));
  for (std::int64_t page_slots : {kInt64Min, std::int64_t{0}, std::int64_t{2} << 20, kInt64Max}) {
    EXPECT_THAT(with([=](Options& o) { o.page_slots = page_slots; }),
                Says("page_slots is " + std::to_string(page_slots)));
  }
  EXPECT_THAT(with([](Options& o) { o.page_slots = 12; }), Says("power of two"));
  EXPECT_THAT(with([](Options& o) { o.pages = 0; }), Says("pages is 0"));
  EXPECT_THAT(with([](Options& o) { o.pages = -1; }), Says("pages is -1"));
  EXPECT_THAT(with([](Options& o) { o.pages = kInt64Max; }), Says("pages is 9223372036854775807"));
  EXPECT_THAT(with([](Options& o) {
                o.layers = 1 << 12;
                o.kv_heads = 1 << 16;
                o.head_dim = o.v_head_dim = 576;
                o.page_slots = 1 << 20;
                o.pages = 4;
              }),
              Says("1297036692682702848 bytes a page it must be from 1 to 3"));
}

TEST(KvPagesTest, BadCallsAreNamedAndChangeNothing) {
  KvCacheOptions options = SmallOptions();
  options.ranks = 2;
  KvCache cache(options);
  EXPECT_THAT([&] { cache.Add(-1); }, Says("first_rank is -1; it must be from 0 to 1"));
  EXPECT_THAT([&] { cache.Add(2); }, Says("first_rank is 2"));
  const SequenceId id = cache.Add(0);
  const std::vector<std::int64_t> tokens = Stamps(1, 12);
  Extend(cache, id, tokens);
  EXPECT_THAT([&] { cache.Grow(id, -1); }, Says("tokens is -1"));
  EXPECT_THAT([&] { cache.Grow(id, kInt64Max); }, Says("tokens is 9223372036854775807"));
  EXPECT_THAT([&] { cache.PagesToGrow(id, (std::int64_t{1} << 40) - 11); },
              Says("can grow by 0 to 1099511627764"));
  EXPECT_THAT([&] { cache.Truncate(id, 13); }, Says("length is 13"));
  EXPECT_THAT([&] { cache.Truncate(id, -1); }, Says("length is -1"));
  for (int layer : {-1, 2}) {
    const std::string text = "layer is " + std::to_string(layer) + "; it must be from 0 to 1";
    EXPECT_THAT([&] { cache.View(id, layer); }, Says(text));
    EXPECT_THAT([&] { WriteLayer(cache, id, layer, {0, 1}, {9}); }, Says(text));
  }
  EXPECT_THAT([&] { WriteLayer(cache, id, 0, {-1, 1}, {8, 9}); }, Says("slots are [-1, 1)"));
  EXPECT_THAT(
      [&] {
        WriteLayer(cache, id, 0, {5, 7}, {8, 9});
      },
      Says("has slots [0, 6) on rank 0"));
  EXPECT_THAT([&] { WriteLayer(cache, id, 0, {3, 2}, {}); }, Says("slots are [3, 2)"));
  EXPECT_THAT([&] { WriteLayer(cache, id, 0, {kInt64Min, kInt64Max}, {}); }, Says("slots are ["));
  EXPECT_THAT([&] { WriteLayer(cache, id, 0, {0, 2}, {9}); }, Says("k has 1 tokens"));

  // A source with one thing wrong, as keys and as values.
  alignas(8) std::array<float, 2 * 2 * 16> rows{};
  const auto k = TensorView::Dense(rows.data(), DType::kF32, 2, 2, 8);
  const auto v = TensorView::Dense(rows.data(), DType::kF32, 2, 2, 16);
  const auto expect = [&](auto change, const std::string& text) {
    TensorView bad = k;
    change(bad);
    EXPECT_THAT([&] { cache.Write(id, 0, {0, 2}, bad, v); }, Says("k" + text));
    bad = v;
    change(bad);
    EXPECT_THAT([&] { cache.Write(id, 0, {0, 2}, k, bad); }, Says("v" + text));
  };
  expect([](TensorView& t) { t.tokens = 3; }, " has 3 tokens; there are 2 slots");
  expect([](TensorView& t) { t.tokens = -1; }, " has -1 tokens");
  expect([](TensorView& t) { t.heads = 1; }, " has 1 heads; the cache has 2");
  expect([](TensorView& t) { t.dim = 24; }, " has dim 24");
  expect([](TensorView& t) { t.dtype = DType::kQ8_0; }, " is q8_0");
  expect([](TensorView& t) { t.data = nullptr; }, " is null");
  expect([](TensorView& t) { t.data = static_cast<const std::byte*>(t.data) + 2; }, " is at ");
  expect([](TensorView& t) { t.token_stride = 34; }, "'s token stride is 34 bytes");
  expect([](TensorView& t) { t.head_stride = -2; }, "'s head stride is -2 bytes");
  expect([](TensorView& t) { t.token_stride = kInt64Max - 3; }, " has 2 tokens ");
  expect([](TensorView& t) { t.head_stride = kInt64Min; }, " has 2 heads ");
  EXPECT_THAT(
      [&] {  // 4 steps of 2^62 bytes come back to the start
        cache.Write(id, 0, {0, 5}, {rows.data(), DType::kF32, 5, 2, 8, std::int64_t{1} << 62, 32},
                    {rows.data(), DType::kF32, 5, 2, 16, 0, 0});
      },
      Says("k has 5 tokens 4611686018427387904 bytes apart: too large to address"));
  EXPECT_THAT(
      [&] {
        TensorView bad = k;
        bad.dtype = static_cast<DType>(7);
        cache.Write(id, 0, {0, 2}, bad, v);
      },
      Says("dtype 7"));
  EXPECT_TRUE(Holds(cache, id, tokens));
  EXPECT_EQ(cache.used_pages(), 2);
}

TEST(KvPagesTest, UnknownAndFreedSequencesAreNamed) {
  KvCache cache(SmallOptions());
  const SequenceId kept = cache.Add();
  const SequenceId freed = cache.Add();
  cache.Free(freed);
  EXPECT_GT(cache.Add(), freed);  // not reused
  const auto expect = [&](SequenceId id, const std::string& text) {
    const TensorView k = TensorView::Dense(nullptr, DType::kF32, 0, 2, 8);
    const TensorView v = TensorView::Dense(nullptr, DType::kF32, 0, 2, 16);
    EXPECT_THAT([&] { cache.Free(id); }, Says(text));
    EXPECT_THAT([&] { cache.Fork(id); }, Says(text));
    EXPECT_THAT([&] { cache.length(id); }, Says(text));
    EXPECT_THAT([&] { cache.first_rank(id); }, Says(text));
    EXPECT_THAT([&] { cache.positions(id); }, Says(text));
    EXPECT_THAT([&] { cache.shards(id); }, Says(text));
    EXPECT_THAT([&] { cache.Grow(id, 0); }, Says(text));
    EXPECT_THAT([&] { cache.PagesToGrow(id, 0); }, Says(text));
    EXPECT_THAT([&] { cache.Truncate(id, 0); }, Says(text));
    EXPECT_THAT([&] { cache.View(id, 0); }, Says(text));
    EXPECT_THAT([&] { cache.Write(id, 0, {0, 0}, k, v); }, Says(text));
  };
  expect(freed, "sequence 2 was freed");
  expect(SequenceId{4}, "sequence 4 was never added");
  expect(SequenceId{}, "sequence 0 was never added");
  expect(SequenceId{kInt64Min}, "sequence -9223372036854775808 was never added");
  EXPECT_EQ(cache.length(kept), 0);
}

}  // namespace
}  // namespace treeline
