#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "treeline/schedule.h"

// Runs schedules for what they send, hold and ask for, on tensors that nobody looks at.
namespace treeline::test {

inline std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Counts query-key pairs and memory, and computes nothing: every result is that of no keys.
class CountingBackend final : public Backend {
 public:
  TrackedBuffer Allocate(std::size_t bytes, Purpose purpose) override {
    return {bytes, purpose, &memory};
  }
  void Attend(const AttentionSpec& spec, std::span<const AttendTask> tasks) override {
    for (const AttendTask& task : tasks) {
      pairs_ += spec.heads * CausalPairs(task.q_positions, task.kv_positions);
      Clear(task.result);
    }
  }
  void AttendBackward(const AttentionSpec&, std::span<const BackwardTask>) override {}
  void AttendClasses(const AttentionSpec&, const AttendTask&, int,
                     std::span<float> parts) override {
    std::fill(parts.begin(), parts.end(), 0.0f);
  }
  void Merge(std::span<const Partial>, const Partial& target) override { Clear(target); }
  void Add(std::span<float>, std::span<const float>) override {}
  std::int64_t pairs() const override { return pairs_; }

  MemoryTracker memory;

 private:
  // Pairs with a key at or before the query. Both sides increase: one walk over each.
  static std::int64_t CausalPairs(const Positions& queries, const Positions& keys) {
    std::int64_t pairs = 0;
    std::int64_t seen = 0;
    for (std::int64_t t = 0; t < queries.count(); ++t) {
      while (seen < keys.count() && keys[seen] <= queries[t]) ++seen;
      pairs += seen;
    }
    return pairs;
  }
  static void Clear(const Partial& partial) {
    std::fill(partial.out.begin(), partial.out.end(), 0.0f);
    std::fill(partial.lse.begin(), partial.lse.end(), kNoKeys);
  }

  std::int64_t pairs_ = 0;
};

// Some ranks of a weighted layout hold three times as much as others, and some nothing at all.
enum class Dealing : std::uint8_t { kContiguous, kStriped, kZigzag, kWeighted, kGaps };
inline constexpr Dealing kFullDealings[] = {Dealing::kContiguous, Dealing::kStriped,
                                            Dealing::kZigzag, Dealing::kWeighted};

// Positions of every rank's part of `tokens` tokens.
inline std::vector<Positions> Deal(Dealing dealing, std::int64_t tokens, int ranks) {
  const auto layout = [&]() -> Layout {
    std::vector<int> weights(Index(ranks));
    switch (dealing) {
      case Dealing::kContiguous:
        return Layout::Contiguous(tokens, ranks);
      case Dealing::kStriped:
        return Layout::Striped(tokens, ranks);
      case Dealing::kZigzag:
        return Layout::Zigzag(tokens, ranks);
      case Dealing::kWeighted:
        for (int r = 0; r < ranks; ++r) weights[Index(r)] = 1 + r % 3;
        break;
      case Dealing::kGaps:
        for (int r = 0; r < ranks; ++r) weights[Index(r)] = (r + 1) % 2;
        break;
    }
    return Layout::Weighted(tokens, weights);
  }();
  std::vector<Positions> shards;
  for (int r = 0; r < ranks; ++r) shards.push_back(layout.Shard(r));
  return shards;
}

// A batch: query tokens and keys of every sequence.
struct Batch {
  struct Sequence {
    std::int64_t queries;
    std::int64_t keys;
  };
  AttentionSpec spec;
  DType q_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  std::vector<Sequence> sequences;

  std::int64_t QueryTokens() const {
    std::int64_t tokens = 0;
    for (const Sequence& s : sequences) tokens += s.queries;
    return tokens;
  }
  // Rows of a partial, of all sequences.
  std::int64_t Rows() const { return QueryTokens() * spec.heads; }
  std::int64_t RowWidth() const { return 4 * spec.v_head_dim + 4; }
};

struct Spent {
  std::vector<CommCounters> counters;  // [rank]
  std::vector<std::size_t> in_flight;  // [rank]; peak
  std::vector<std::int64_t> pairs;     // [rank]

  std::int64_t Rounds() const {
    std::int64_t most = 0;
    for (const CommCounters& c : counters) most = std::max(most, c.rounds);
    return most;
  }
};

// One rank's tensors of a sequence. Nobody looks at the values.
struct Tensors {
  Tensors(const Batch& batch, std::int64_t tokens, std::int64_t slots, bool with_keys)
      : q(Index(tokens * batch.spec.heads) * RowBytes(batch.q_dtype, batch.spec.head_dim)),
        out(Index(tokens * batch.spec.heads * batch.spec.v_head_dim)),
        lse(Index(tokens * batch.spec.heads)) {
    const AttentionSpec& spec = batch.spec;
    if (with_keys) {
      k.resize(Index(slots * spec.kv_heads) * RowBytes(batch.kv_dtype, spec.head_dim));
      v.resize(Index(slots * spec.kv_heads) * RowBytes(batch.kv_dtype, spec.v_head_dim));
    }
    query = TensorView::Dense(q.data(), batch.q_dtype, tokens, spec.heads, spec.head_dim);
    keys = KvView::Strided(
        TensorView::Dense(k.data(), batch.kv_dtype, slots, spec.kv_heads, spec.head_dim),
        TensorView::Dense(v.data(), batch.kv_dtype, slots, spec.kv_heads, spec.v_head_dim));
  }

  std::vector<std::byte> q, k, v;
  std::vector<float> out, lse;
  TensorView query;
  KvView keys;
};

// Runs body(communicator, backend) on every rank.
inline Spent RunCounted(int ranks,
                        const std::function<void(Communicator&, CountingBackend&)>& body) {
  Spent spent{std::vector<CommCounters>(Index(ranks)), std::vector<std::size_t>(Index(ranks)),
              std::vector<std::int64_t>(Index(ranks))};
  RunRanks({.ranks = ranks}, [&](Communicator& comm) {
    CountingBackend backend;
    body(comm, backend);
    spent.counters[Index(comm.rank())] = comm.counters();
    spent.in_flight[Index(comm.rank())] = backend.memory.peak(Purpose::kInFlight);
    spent.pairs[Index(comm.rank())] = backend.pairs();
  });
  return spent;
}

// Every rank has all queries. Only a schedule that sends keys has any in memory.
inline Spent CountDecode(const Batch& batch, Dealing dealing, int ranks,
                         const DecodeOptions& options) {
  return RunCounted(ranks, [&](Communicator& comm, CountingBackend& backend) {
    std::vector<std::vector<Positions>> shards;
    std::vector<Tensors> tensors;
    for (const Batch::Sequence& s : batch.sequences) {
      shards.push_back(Deal(dealing, s.keys, ranks));
      tensors.emplace_back(batch, s.queries, shards.back()[Index(comm.rank())].count(),
                           options.schedule == Schedule::kRingKv);
    }
    std::vector<ShardedTask> tasks;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      Tensors& t = tensors[i];
      tasks.push_back({.local = {.q = t.query,
                                 .q_positions = Positions::Contiguous(0, t.query.tokens),
                                 .kv = t.keys,
                                 .kv_positions = shards[i][Index(comm.rank())],
                                 .result = {t.out, t.lse, batch.spec.v_head_dim}},
                       .kv_shards = shards[i]});
    }
    Decode(comm, backend, batch.spec, tasks, options);
  });
}

// Queries are spread like keys, but there may be more or fewer of them.
inline Spent CountPrefill(const Batch& batch, Dealing dealing, int ranks, Schedule schedule) {
  return RunCounted(ranks, [&](Communicator& comm, CountingBackend& backend) {
    std::vector<std::vector<Positions>> q_shards;
    std::vector<std::vector<Positions>> kv_shards;
    std::vector<Tensors> tensors;
    for (const Batch::Sequence& s : batch.sequences) {
      q_shards.push_back(Deal(dealing, s.queries, ranks));
      kv_shards.push_back(Deal(dealing, s.keys, ranks));
      tensors.emplace_back(batch, q_shards.back()[Index(comm.rank())].count(),
                           kv_shards.back()[Index(comm.rank())].count(), /*with_keys=*/true);
    }
    std::vector<ShardedTask> tasks;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      Tensors& t = tensors[i];
      tasks.push_back({.local = {.q = t.query,
                                 .q_positions = q_shards[i][Index(comm.rank())],
                                 .kv = t.keys,
                                 .kv_positions = kv_shards[i][Index(comm.rank())],
                                 .result = {t.out, t.lse, batch.spec.v_head_dim}},
                       .kv_shards = kv_shards[i],
                       .q_shards = q_shards[i]});
    }
    Prefill(comm, backend, batch.spec, tasks, schedule);
  });
}

inline Spent CountBackward(const Batch& batch, Dealing dealing, int ranks) {
  return RunCounted(ranks, [&](Communicator& comm, CountingBackend& backend) {
    const AttentionSpec& spec = batch.spec;
    std::vector<std::vector<Positions>> shards;
    std::vector<Tensors> tensors;
    std::vector<std::vector<float>> gradients;  // dk, dv of every sequence
    for (const Batch::Sequence& s : batch.sequences) {
      shards.push_back(Deal(dealing, s.keys, ranks));
      const std::int64_t slots = shards.back()[Index(comm.rank())].count();
      tensors.emplace_back(batch, slots, slots, /*with_keys=*/true);
      gradients.emplace_back(Index(slots * spec.kv_heads * spec.head_dim));
      gradients.emplace_back(Index(slots * spec.kv_heads * spec.v_head_dim));
    }
    std::vector<ShardedBackwardTask> tasks;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensors& t = tensors[i];
      const Positions& positions = shards[i][Index(comm.rank())];
      const std::int64_t slots = positions.count();
      const auto out =
          TensorView::Dense(t.out.data(), DType::kF32, slots, spec.heads, spec.v_head_dim);
      tasks.push_back({.local = {.q = t.query,
                                 .q_positions = positions,
                                 .kv = t.keys,
                                 .kv_positions = positions,
                                 .out = out,
                                 .d_out = out,
                                 .lse = t.lse,
                                 .dq = {},
                                 .dk = GradView::Dense(gradients[2 * i].data(), slots,
                                                       spec.kv_heads, spec.head_dim),
                                 .dv = GradView::Dense(gradients[2 * i + 1].data(), slots,
                                                       spec.kv_heads, spec.v_head_dim)},
                       .kv_shards = shards[i]});
    }
    std::vector<float> d_sinks(spec.sinks.size());
    PrefillBackward(comm, backend, spec, tasks, d_sinks);
  });
}

}  // namespace treeline::test
