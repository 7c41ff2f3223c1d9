#include "cli/rank_check.h"

#include <algorithm>
#include <cstring>

#include "cli/check.h"
#include "cli/deal.h"
#include "cli/ranks.h"
#include "core/check.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Values of a token.
std::size_t Values(int heads, int dim) { return Index(heads) * Index(dim); }

// Positions of every rank's part of a sequence.
std::vector<Positions> Deal(LayoutKind kind, std::int64_t tokens, int ranks) {
  const Layout layout = MakeLayout(kind, tokens, ranks);
  std::vector<Positions> shards;
  shards.reserve(Index(ranks));
  for (int r = 0; r < ranks; ++r) shards.push_back(layout.Shard(r));
  return shards;
}

// The position of the first query of a task whose queries end its sequence.
template <class Task>
std::int64_t FirstQuery(const Task& task) {
  const std::int64_t first = task.kv.slots - task.q.tokens;
  Require(task.q.tokens == 0 || (task.q_positions[0] == first &&
                                 task.q_positions[task.q.tokens - 1] == task.kv.slots - 1),
          "queries to deal must be the last tokens of their sequence");
  return first;
}

// Of every rank's part of a sequence, what is at `first` or later.
std::vector<Positions> DealQueries(std::span<const Positions> shards, std::int64_t first) {
  std::vector<Positions> tails;
  for (const Positions& shard : shards) tails.push_back(Tail(shard, shard.CountBelow(first)));
  return tails;
}

// One sequence's results, or the part of them that a rank holds.
struct Rows {
  std::vector<float> out;
  std::vector<float> lse;

  Rows() = default;
  Rows(const AttentionSpec& spec, std::int64_t tokens)
      : out(Index(tokens * spec.heads * spec.v_head_dim), kUnwritten),
        lse(Index(tokens * spec.heads), kUnwritten) {}

  static constexpr float kUnwritten = 1e30f;
  Partial partial(const AttentionSpec& spec) { return {out, lse, spec.v_head_dim}; }
};

// Copies token i of a rank's part to where it belongs in the whole, whose tokens start at position
// `first`.
void Collect(std::span<const float> part, const Positions& positions, std::int64_t first,
             std::size_t token_values, std::span<float> whole) {
  for (std::int64_t i = 0; i < positions.count(); ++i) {
    std::copy_n(
        part.begin() + static_cast<std::ptrdiff_t>(Index(i) * token_values), token_values,
        whole.begin() + static_cast<std::ptrdiff_t>(Index(positions[i] - first) * token_values));
  }
}

template <class T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// What a rank has of its own: memory, counted, and threads.
struct RankResources {
  RankResources(const RankSetup& setup, Communicator& comm)
      : pool(setup.ranks.threads_per_rank),
        backend({.pool = &pool, .memory = &memory, .isa = setup.isa, .poll = ProgressOf(comm)}) {}

  ThreadPool pool;
  MemoryTracker memory;
  CpuBackend backend;
};

}  // namespace

std::int64_t RankReport::MostBytes() const {
  std::int64_t most = 0;
  for (const CommCounters& c : counters) most = std::max(most, c.bytes);
  return most;
}

std::int64_t RankReport::MostMessages() const {
  std::int64_t most = 0;
  for (const CommCounters& c : counters) most = std::max(most, c.messages);
  return most;
}

std::int64_t RankReport::Rounds() const {
  std::int64_t most = 0;
  for (const CommCounters& c : counters) most = std::max(most, c.rounds);
  return most;
}

RankReport& RankReport::AddBits(const std::vector<float>& values) {
  bits.insert(bits.end(), values.begin(), values.end());
  return *this;
}

std::size_t RankReport::PeakBytes() const {
  return peak_bytes.empty() ? 0 : *std::max_element(peak_bytes.begin(), peak_bytes.end());
}

struct RankProblem::Impl {
  explicit Impl(const ProblemShape& shape) : problem(shape) {}

  const std::vector<reference::Result>& Expected() {
    if (expected.empty()) {
      for (const AttendTask& task : problem.tasks()) {
        expected.push_back(reference::Attend(problem.spec(), task, reference::Sinks::kInclude));
      }
    }
    return expected;
  }

  double BoundOf(Kernel kernel, Isa isa) const {
    const ProblemShape& shape = problem.shape();
    return Bound(kernel, ArithmeticOf(kernel, isa, shape.spec, shape.q_dtype, shape.kv_dtype));
  }

  // Runs body(rank's communicator, resources) on every rank and fills in what it counted, and the
  // parts of `results` that ranks have filled in.
  template <class Body>
  RankReport Run(const RankSetup& setup, std::span<const std::span<float>> results, float unwritten,
                 const Body& body) {
    RankReport report;
    const std::size_t ranks = Index(setup.ranks.ranks);
    report.counters.resize(ranks);
    report.peak_bytes.resize(ranks);
    report.pairs.resize(ranks);
    const auto run = setup.in_process ? RunRanks : RunOverRanks;
    run(setup.ranks, [&](Communicator& comm) {
      RankResources resources(setup, comm);
      comm.ResetCounters();
      const auto decorated = setup.decorate ? setup.decorate(comm) : nullptr;
      body(decorated ? *decorated : comm, resources);
      const std::size_t rank = Index(comm.rank());
      report.counters[rank] = comm.counters();
      report.peak_bytes[rank] = resources.memory.peak();
      report.pairs[rank] = resources.backend.pairs();
      if (setup.in_process) return;
      FillIn<CommCounters>(comm, report.counters);
      FillIn<std::size_t>(comm, report.peak_bytes);
      FillIn<std::int64_t>(comm, report.pairs);
      for (const std::span<float> part : results) FillIn(comm, part, unwritten);
    });
    return report;
  }

  void Compare(const Rows& rows, std::size_t task, Isa isa, RankReport& report) {
    const reference::Result& want = Expected()[task];
    report.bound =
        std::max(report.bound, BoundOf(KernelOf(problem.spec(), problem.tasks()[task]), isa));
    const double error =
        std::max(reference::MaxError(rows.out, want.out), reference::MaxError(rows.lse, want.lse));
    report.max_error =
        std::max(report.max_error, error / reference::BoundGrowth(want.score_magnitude));
  }

  RankReport Decode(const RankSetup& setup, const DecodeOptions& options) {
    const AttentionSpec& spec = problem.spec();
    const std::span<const AttendTask> tasks = problem.tasks();
    const int ranks = setup.ranks.ranks;
    std::vector<std::vector<Rows>> results(Index(ranks));  // [rank, task]
    std::vector<std::span<float>> parts;
    for (std::vector<Rows>& of_rank : results) {
      for (const AttendTask& task : tasks) {
        Rows& rows = of_rank.emplace_back(spec, task.q.tokens);
        parts.insert(parts.end(), {rows.out, rows.lse});
      }
    }
    RankReport report =
        Run(setup, parts, Rows::kUnwritten, [&](Communicator& comm, RankResources& resources) {
          std::vector<std::vector<Positions>> shards;
          std::vector<DealtKeys> keys;
          std::vector<Rows>& own = results[Index(comm.rank())];
          std::vector<ShardedTask> sharded;
          for (const AttendTask& task : tasks) {
            shards.push_back(Deal(setup.layout, task.kv.slots, ranks));
            keys.push_back(DealKeys(task.kv, shards.back()[Index(comm.rank())], setup.page_slots));
            resources.memory.Add(Purpose::kShard, keys.back().bytes.size());
          }
          for (std::size_t i = 0; i < tasks.size(); ++i) {
            AttendTask local = tasks[i];
            local.kv = keys[i].view;
            local.kv_positions = shards[i][Index(comm.rank())];
            local.result = own[i].partial(spec);
            sharded.push_back({.local = local, .kv_shards = shards[i]});
          }
          treeline::Decode(comm, resources.backend, spec, sharded, options);
        });
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const Rows& rows = results[0][i];
      Compare(rows, i, setup.isa, report);
      report.AddBits(rows.out).AddBits(rows.lse);
    }
    for (const std::vector<Rows>& of_rank : results) {
      for (std::size_t i = 0; i < tasks.size(); ++i) {
        report.same_bits = report.same_bits && SameBits(of_rank[i].out, results[0][i].out) &&
                           SameBits(of_rank[i].lse, results[0][i].lse);
      }
    }
    return report;
  }

  RankReport Prefill(const RankSetup& setup, Schedule schedule) {
    const AttentionSpec& spec = problem.spec();
    const std::span<const AttendTask> tasks = problem.tasks();
    std::vector<Rows> results;
    for (const AttendTask& task : tasks) results.emplace_back(spec, task.q.tokens);
    std::vector<std::span<float>> parts;
    for (Rows& rows : results) parts.insert(parts.end(), {rows.out, rows.lse});
    RankReport report =
        Run(setup, parts, Rows::kUnwritten, [&](Communicator& comm, RankResources& resources) {
          std::vector<std::vector<Positions>> shards;
          std::vector<std::vector<Positions>> q_shards;
          std::vector<DealtKeys> keys;
          std::vector<DealtRows> queries;
          std::vector<Rows> own;
          std::vector<ShardedTask> sharded;
          for (const AttendTask& task : tasks) {
            const std::int64_t first = FirstQuery(task);
            shards.push_back(Deal(setup.layout, task.kv.slots, comm.size()));
            q_shards.push_back(DealQueries(shards.back(), first));
            const Positions& positions = q_shards.back()[Index(comm.rank())];
            keys.push_back(DealKeys(task.kv, shards.back()[Index(comm.rank())], setup.page_slots));
            queries.push_back(DealRows(task.q, positions, first));
            own.emplace_back(spec, positions.count());
            resources.memory.Add(Purpose::kShard,
                                 keys.back().bytes.size() + queries.back().bytes.size());
            resources.memory.Add(Purpose::kResult,
                                 (own.back().out.size() + own.back().lse.size()) * sizeof(float));
          }
          for (std::size_t i = 0; i < tasks.size(); ++i) {
            sharded.push_back({.local = {.q = queries[i].view,
                                         .q_positions = q_shards[i][Index(comm.rank())],
                                         .kv = keys[i].view,
                                         .kv_positions = shards[i][Index(comm.rank())],
                                         .result = own[i].partial(spec)},
                               .kv_shards = shards[i],
                               .q_shards = q_shards[i]});
          }
          treeline::Prefill(comm, resources.backend, spec, sharded, schedule);
          for (std::size_t i = 0; i < tasks.size(); ++i) {
            const Positions& positions = q_shards[i][Index(comm.rank())];
            const std::int64_t first = FirstQuery(tasks[i]);
            Collect(own[i].out, positions, first, Values(spec.heads, spec.v_head_dim),
                    results[i].out);
            Collect(own[i].lse, positions, first, Index(spec.heads), results[i].lse);
          }
        });
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      Compare(results[i], i, setup.isa, report);
      report.AddBits(results[i].out).AddBits(results[i].lse);
    }
    return report;
  }

  // The final out and lse of a forward pass on one device, from which gradients are computed.
  void PrepareBackward() {
    if (!expected_gradients.empty() || problem.tasks().empty()) return;
    const AttentionSpec& spec = problem.spec();
    Attend(spec, problem.tasks());
    for (const AttendTask& task : problem.tasks()) ApplySinks(spec, task.result);
    backward = problem.MakeBackward();
    for (const BackwardTask& task : backward) {
      expected_gradients.push_back(reference::Backward(spec, task));
    }
  }

  RankReport Backward(const RankSetup& setup) {
    PrepareBackward();
    const AttentionSpec& spec = problem.spec();
    struct Gradients {
      std::vector<float> dq;
      std::vector<float> dk;
      std::vector<float> dv;
    };
    const auto sized = [&](std::int64_t tokens, std::int64_t slots) {
      return Gradients{std::vector<float>(Index(tokens * spec.heads * spec.head_dim)),
                       std::vector<float>(Index(slots * spec.kv_heads * spec.head_dim)),
                       std::vector<float>(Index(slots * spec.kv_heads * spec.v_head_dim))};
    };
    std::vector<Gradients> results;
    for (const BackwardTask& task : backward)
      results.push_back(sized(task.q.tokens, task.kv.slots));
    std::vector<std::vector<float>> d_sinks(Index(setup.ranks.ranks),
                                            std::vector<float>(spec.sinks.size()));
    std::vector<std::span<float>> parts;
    for (Gradients& g : results) parts.insert(parts.end(), {g.dq, g.dk, g.dv});
    parts.insert(parts.end(), d_sinks.begin(), d_sinks.end());
    RankReport report = Run(setup, parts, 0.0f, [&](Communicator& comm, RankResources& resources) {
      std::vector<std::vector<Positions>> shards;
      std::vector<Positions> queries;  // of this rank
      std::vector<DealtKeys> keys;
      std::vector<std::array<DealtRows, 3>> rows;  // q, out, d_out
      std::vector<std::vector<float>> lse;
      std::vector<Gradients> own;
      std::vector<ShardedBackwardTask> sharded;
      for (const BackwardTask& task : backward) {
        const std::int64_t first = FirstQuery(task);
        shards.push_back(Deal(setup.layout, task.kv.slots, comm.size()));
        const Positions& slots = shards.back()[Index(comm.rank())];
        const Positions& positions = queries.emplace_back(Tail(slots, slots.CountBelow(first)));
        keys.push_back(DealKeys(task.kv, slots, setup.page_slots));
        rows.push_back({DealRows(task.q, positions, first), DealRows(task.out, positions, first),
                        DealRows(task.d_out, positions, first)});
        std::vector<float>& of_rank = lse.emplace_back();
        for (std::int64_t i = 0; i < positions.count(); ++i) {
          const auto row =
              task.lse.subspan(Index((positions[i] - first) * spec.heads), Index(spec.heads));
          of_rank.insert(of_rank.end(), row.begin(), row.end());
        }
        own.push_back(sized(positions.count(), slots.count()));
        resources.memory.Add(Purpose::kShard, keys.back().bytes.size());
      }
      for (std::size_t i = 0; i < backward.size(); ++i) {
        const Positions& positions = shards[i][Index(comm.rank())];
        const std::int64_t n = positions.count();
        sharded.push_back(
            {.local = {.q = rows[i][0].view,
                       .q_positions = queries[i],
                       .kv = keys[i].view,
                       .kv_positions = positions,
                       .out = rows[i][1].view,
                       .d_out = rows[i][2].view,
                       .lse = lse[i],
                       .dq = GradView::Dense(own[i].dq.data(), queries[i].count(), spec.heads,
                                             spec.head_dim),
                       .dk = GradView::Dense(own[i].dk.data(), n, spec.kv_heads, spec.head_dim),
                       .dv = GradView::Dense(own[i].dv.data(), n, spec.kv_heads, spec.v_head_dim)},
             .kv_shards = shards[i]});
      }
      PrefillBackward(comm, resources.backend, spec, sharded, d_sinks[Index(comm.rank())]);
      for (std::size_t i = 0; i < backward.size(); ++i) {
        const Positions& positions = shards[i][Index(comm.rank())];
        const std::int64_t first = FirstQuery(backward[i]);
        Collect(own[i].dq, queries[i], first, Values(spec.heads, spec.head_dim), results[i].dq);
        Collect(own[i].dk, positions, 0, Values(spec.kv_heads, spec.head_dim), results[i].dk);
        Collect(own[i].dv, positions, 0, Values(spec.kv_heads, spec.v_head_dim), results[i].dv);
      }
    });
    double growth = 1.0;
    std::vector<double> want_sinks(spec.sinks.size());
    for (std::size_t i = 0; i < backward.size(); ++i) {
      const reference::Gradients& want = expected_gradients[i];
      report.max_error = std::max({report.max_error, reference::MaxError(results[i].dq, want.dq),
                                   reference::MaxError(results[i].dk, want.dk),
                                   reference::MaxError(results[i].dv, want.dv)});
      report.AddBits(results[i].dq).AddBits(results[i].dk).AddBits(results[i].dv);
      for (std::size_t h = 0; h < want.dsinks.size(); ++h) want_sinks[h] += want.dsinks[h];
      growth = std::max(growth, reference::BoundGrowth(Expected()[i].score_magnitude));
    }
    for (const std::vector<float>& of_rank : d_sinks) {
      report.max_error = std::max(report.max_error, reference::MaxError(of_rank, want_sinks));
      report.same_bits = report.same_bits && SameBits(of_rank, d_sinks[0]);
    }
    report.max_error /= growth;
    report.bound = BoundOf(Kernel::kBackward, setup.isa);
    return report;
  }

  Problem problem;
  std::vector<reference::Result> expected;
  std::vector<BackwardTask> backward;
  std::vector<reference::Gradients> expected_gradients;
};

RankProblem::RankProblem(const ProblemShape& shape) : impl_(std::make_unique<Impl>(shape)) {}
RankProblem::~RankProblem() = default;
const AttentionSpec& RankProblem::spec() const { return impl_->problem.spec(); }
RankReport RankProblem::Decode(const RankSetup& setup, const DecodeOptions& options) {
  return impl_->Decode(setup, options);
}
RankReport RankProblem::Prefill(const RankSetup& setup, Schedule schedule) {
  return impl_->Prefill(setup, schedule);
}
RankReport RankProblem::Backward(const RankSetup& setup) { return impl_->Backward(setup); }

}  // namespace treeline::cli
