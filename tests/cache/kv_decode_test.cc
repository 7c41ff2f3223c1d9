// Attention over what caches hold.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "cache/kv_testing.h"
#include "treeline/attention.h"
#include "treeline/isa.h"
#include "treeline/kv_cache.h"
#include "treeline/reference.h"
#include "treeline/schedule.h"

namespace treeline {
namespace {

using test::Group;

// Fills what must not be read with NaN, in release builds too.
void PoisonUnusedSlots(const KvCache& cache, SequenceId id) {
  for (int layer = 0; layer < cache.options().layers; ++layer) {
    KvView view = cache.View(id, layer);
    if (view.slots % view.page_slots == 0) continue;
    for (std::int64_t slot = view.slots; slot % view.page_slots != 0; ++slot) {
      for (int head = 0; head < view.kv_heads; ++head) {
        std::memset(const_cast<std::byte*>(view.KeyRow(slot, head)), 0xFF,
                    RowBytes(view.dtype, view.k.dim));
        std::memset(const_cast<std::byte*>(view.ValueRow(slot, head)), 0xFF,
                    RowBytes(view.dtype, view.v.dim));
      }
    }
  }
}

struct DecodeCase {
  AttentionSpec spec;
  DType dtype = DType::kF32;
  int ranks = 1;
  std::int64_t run = 1;
  std::int64_t tokens = 0;
};

// N(0, 1) rows for all positions.
std::vector<float> RandomRows(std::mt19937& random, std::int64_t tokens, int heads, int dim) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(tokens * heads * dim));
  for (float& x : rows) x = normal(random);
  return rows;
}

// Grows layer 0 by `tokens` tokens, whose rows are at their positions in k and v, [tokens,
// kv_heads, dim].
void Append(KvCache& cache, SequenceId id, std::int64_t tokens, const std::vector<float>& k,
            const std::vector<float>& v) {
  const KvCacheOptions& options = cache.options();
  const auto row = [&](const std::vector<float>& rows, std::int64_t position, int dim) {
    return TensorView::Dense(rows.data() + position * options.kv_heads * dim, DType::kF32, 1,
                             options.kv_heads, dim);
  };
  const SlotRange gained = cache.Grow(id, tokens);
  const Positions positions = cache.positions(id);
  for (std::int64_t slot = gained.begin; slot < gained.end; ++slot) {
    cache.Write(id, 0, {slot, slot + 1}, row(k, positions[slot], options.head_dim),
                row(v, positions[slot], options.v_head_dim));
  }
}

// One token decoded on one rank, by the oracle, and on `ranks` ranks, by kernels and a merge.
void ExpectSameDecode(const DecodeCase& c) {
  SCOPED_TRACE(testing::Message() << Name(c.dtype) << ", " << c.ranks << " ranks, run " << c.run
                                  << ", " << c.tokens << " tokens");
  std::mt19937 random(static_cast<unsigned>(c.tokens));
  const AttentionSpec& spec = c.spec;
  KvCacheOptions options{.ranks = c.ranks,
                         .layers = 1,
                         .kv_heads = spec.kv_heads,
                         .head_dim = spec.head_dim,
                         .v_head_dim = spec.v_head_dim,
                         .dtype = c.dtype,
                         .run = c.run,
                         .page_slots = 16,
                         .pages = 40};
  std::deque<KvCache> group = Group(options);
  options.ranks = 1;
  KvCache whole(options);
  const auto k = RandomRows(random, c.tokens, spec.kv_heads, spec.head_dim);
  const auto v = RandomRows(random, c.tokens, spec.kv_heads, spec.v_head_dim);
  const auto q = RandomRows(random, 1, spec.heads, spec.head_dim);
  const auto append = [&](KvCache& cache) {
    const SequenceId id = cache.Add(c.ranks > 2 && &cache != &whole ? 2 : 0);
    Append(cache, id, c.tokens, k, v);
    PoisonUnusedSlots(cache, id);
    return id;
  };
  const auto task = [&](KvCache& cache, SequenceId id, const Partial& result) {
    return AttendTask{
        .q = TensorView::Dense(q.data(), DType::kF32, 1, spec.heads, spec.head_dim),
        .q_positions = Positions::Contiguous(std::max<std::int64_t>(c.tokens - 1, 0), 1),
        .kv = cache.View(id, 0),
        .kv_positions = cache.positions(id),
        .result = result};
  };
  const reference::Result expected = reference::Attend(spec, task(whole, append(whole), {}));
  std::vector<SequenceId> ids;
  for (KvCache& cache : group) ids.push_back(append(cache));

  const auto rows = static_cast<std::size_t>(spec.heads);
  const std::size_t values = rows * static_cast<std::size_t>(spec.v_head_dim);
  for (Isa isa : AttainableIsas()) {
    std::vector<float> out(group.size() * values), lse(group.size() * rows);
    std::vector<Partial> parts;
    for (std::size_t r = 0; r < group.size(); ++r) {
      parts.push_back({std::span(out).subspan(r * values, values),
                       std::span(lse).subspan(r * rows, rows), spec.v_head_dim});
      const AttendTask part = task(group[r], ids[r], parts.back());
      Attend(spec, {&part, 1}, {.isa = isa});
    }
    Merge(parts, parts[0], {.isa = isa});
    const double bound = 1e-5 * reference::BoundGrowth(expected.score_magnitude);
    EXPECT_LE(reference::MaxError(parts[0].out, expected.out), bound) << Name(isa);
    EXPECT_LE(reference::MaxError(parts[0].lse, expected.lse), bound) << Name(isa);
  }
}

TEST(KvDecodeTest, DecodingOverRanksIsDecodingOnOne) {
  AttentionSpec spec = AttentionSpec::Make(4, 2, 24);
  spec.v_head_dim = 40;
  spec.causal = true;
  AttentionSpec window = spec;
  window.window = 19;
  AttentionSpec latent = AttentionSpec::Make(16, 1, 576);
  latent.v_head_dim = 512;
  for (DType dtype : kAllDTypes) {
    for (int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64}) {
      for (std::int64_t run : {1, 3, 16}) {
        for (std::int64_t tokens : {0, 1, 131}) ExpectSameDecode({spec, dtype, ranks, run, tokens});
      }
    }
    ExpectSameDecode({window, dtype, 4, 3, 131});
    ExpectSameDecode({latent, dtype, 3, 1, 67});
  }
}

// Threads that own a cache each: a prompt, then tokens one by one, of two sequences that start on
// different ranks. Where a sequence starts must not show in a single bit.
TEST(KvDecodeTest, BitsDoNotDependOnRanksOrOnTheFirst) {
  constexpr std::int64_t kPrompt = 150;
  constexpr std::int64_t kSteps = 3;
  constexpr std::size_t kSequences = 2;
  AttentionSpec spec = AttentionSpec::Make(4, 2, 16);
  spec.causal = true;
  std::mt19937 random(11);
  const std::int64_t tokens = kPrompt + kSteps;
  const auto k = RandomRows(random, tokens, spec.kv_heads, spec.head_dim);
  const auto v = RandomRows(random, tokens, spec.kv_heads, spec.head_dim);
  const auto q = RandomRows(random, kSteps, spec.heads, spec.head_dim);
  const auto q_floats = static_cast<std::size_t>(spec.heads * spec.head_dim);

  // [step, sequence, head, dim] of each rank.
  const auto decode = [&](int ranks, int first_rank) {
    std::vector<std::vector<float>> outs(static_cast<std::size_t>(ranks));
    RunRanks({.ranks = ranks}, [&](Communicator& comm) {
      KvCache cache({.rank = comm.rank(),
                     .ranks = ranks,
                     .kv_heads = spec.kv_heads,
                     .head_dim = spec.head_dim,
                     .v_head_dim = spec.v_head_dim,
                     .page_slots = 16,
                     .pages = 40});
      CpuBackend backend;
      std::vector<SequenceId> ids;
      for (int s = 0; s < static_cast<int>(kSequences); ++s) {
        ids.push_back(cache.Add((first_rank + s) % ranks));
        Append(cache, ids.back(), kPrompt, k, v);
      }
      auto& out = outs[static_cast<std::size_t>(comm.rank())];
      for (std::int64_t step = 0; step < kSteps; ++step) {
        std::vector<float> result(kSequences * q_floats);
        std::vector<float> lse(kSequences * static_cast<std::size_t>(spec.heads));
        std::vector<std::vector<Positions>> shards;
        std::vector<ShardedTask> tasks;
        for (SequenceId id : ids) {
          Append(cache, id, 1, k, v);
          shards.push_back(cache.shards(id));
        }
        for (std::size_t s = 0; s < kSequences; ++s) {
          const auto heads = static_cast<std::size_t>(spec.heads);
          tasks.push_back(
              {{.q = TensorView::Dense(q.data() + static_cast<std::size_t>(step) * q_floats,
                                       DType::kF32, 1, spec.heads, spec.head_dim),
                .q_positions = Positions::Contiguous(kPrompt + step, 1),
                .kv = cache.View(ids[s], 0),
                .kv_positions = cache.positions(ids[s]),
                .result = {std::span(result).subspan(s * q_floats, q_floats),
                           std::span(lse).subspan(s * heads, heads), spec.v_head_dim}},
               shards[s]});
        }
        Decode(comm, backend, spec, tasks, {.reproducible = true});
        out.insert(out.end(), result.begin(), result.end());
      }
    });
    for (const auto& out : outs) EXPECT_EQ(out, outs[0]);
    return outs[0];
  };
  const std::vector<float> one = decode(1, 0);
  EXPECT_TRUE(std::ranges::all_of(one, [](float x) { return std::isfinite(x); }));
  for (int ranks : {2, 4, 8, 16}) {
    for (int first_rank = 0; first_rank < ranks; first_rank += 1 + first_rank) {
      EXPECT_EQ(decode(ranks, first_rank), one) << ranks << " ranks from " << first_rank;
    }
  }
}

}  // namespace
}  // namespace treeline
