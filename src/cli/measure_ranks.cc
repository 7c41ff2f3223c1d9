#include "cli/measure_ranks.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <tuple>

#include "cli/check.h"
#include "cli/deal.h"
#include "cli/limits.h"
#include "cli/ranks.h"
#include "schedule/collectives/collectives.h"
#include "treeline/memory.h"
#include "treeline/reference.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {
namespace {

// Steps that are timed together where one is shorter than the clock is good for.
constexpr int kMergeSteps = 200;

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

ProblemShape MakeShape(const RankCase& c, std::uint64_t seed) {
  ProblemShape shape;
  shape.spec = AttentionSpec::Make(c.heads, c.kv_heads, c.head_dim);
  shape.spec.causal = true;
  shape.q_dtype = c.dtype == DType::kQ8_0 ? DType::kF32 : c.dtype;
  shape.kv_dtype = c.dtype;
  shape.seed = seed;
  const bool decode = c.work == RankWork::kDecode;
  for (int s = 0; s < c.batch; ++s) {
    const Positions keys = Positions::Contiguous(0, c.context);
    shape.sequences.push_back({decode ? Positions::Contiguous(c.context - 1, 1) : keys, keys});
  }
  return shape;
}

// Memory of one rank: what a real one would hold, and nothing of the others.
struct RankMemory {
  HugeBuffer keys;
  std::vector<std::vector<Positions>> shards;  // [sequence, rank]
  std::vector<KvView> kv;                      // [sequence]
  std::vector<DealtRows> q;
  std::vector<std::vector<float>> out;
  std::vector<std::vector<float>> lse;
};

RankMemory MakeMemory(const RankCase& c, const Problem& problem, int rank, MemoryTracker& tracker) {
  const AttentionSpec& spec = problem.spec();
  RankMemory memory;
  std::size_t bytes = 0;
  for (const AttendTask& task : problem.tasks()) {
    const Layout layout = MakeLayout(c.layout, task.kv.slots, c.ranks);
    std::vector<Positions>& shards = memory.shards.emplace_back();
    for (int r = 0; r < c.ranks; ++r) shards.push_back(layout.Shard(r));
    bytes += KeyBytes(task.kv, shards[Index(rank)].count());
  }
  memory.keys = HugeBuffer(bytes);
  tracker.Add(Purpose::kShard, bytes);
  std::byte* next = memory.keys.data();
  for (std::size_t i = 0; i < problem.tasks().size(); ++i) {
    const AttendTask& task = problem.tasks()[i];
    const Positions& own = memory.shards[i][Index(rank)];
    memory.kv.push_back(CopyKeys(task.kv, own, next));
    next += KeyBytes(task.kv, own.count());
    const bool decode = c.work == RankWork::kDecode;
    const std::int64_t tokens = decode ? task.q.tokens : own.count();
    memory.q.push_back(DealRows(task.q, decode ? Positions::Contiguous(0, tokens) : own));
    memory.out.emplace_back(Index(tokens * spec.heads * spec.v_head_dim));
    memory.lse.emplace_back(Index(tokens * spec.heads));
    tracker.Add(Purpose::kResult, (memory.out.back().size() + memory.lse.back().size()) * 4);
  }
  return memory;
}

std::vector<ShardedTask> MakeTasks(const RankCase& c, const Problem& problem, int rank,
                                   RankMemory& memory) {
  std::vector<ShardedTask> tasks;
  for (std::size_t i = 0; i < memory.kv.size(); ++i) {
    const Positions& own = memory.shards[i][Index(rank)];
    tasks.push_back(
        {.local = {.q = memory.q[i].view,
                   .q_positions =
                       c.work == RankWork::kDecode ? problem.tasks()[i].q_positions : own,
                   .kv = memory.kv[i],
                   .kv_positions = own,
                   .result = {memory.out[i], memory.lse[i], problem.spec().v_head_dim}},
         .kv_shards = memory.shards[i],
         .q_shards = memory.shards[i]});
  }
  return tasks;
}

// What measures the limit of a host has as many threads as its ranks.
int LimitThreads(const RankCase& c) { return IsFirst() ? RanksHere(c.ranks) * c.threads : 1; }

// Times step() on all ranks, between two measurements of the limit.
void Time(Communicator& comm, const RankTiming& timing, int steps,
          const std::function<double()>& limit, const std::function<void()>& step,
          RankMeasurement& m) {
  for (int i = 0; i < timing.repeats; ++i) {
    const double before = comm.rank() == 0 && limit ? limit() : 0.0;
    Barrier(comm);
    Barrier(comm);  // ranks that waited long for the first one slept, and come late
    const double seconds = TimeOnce([&] {
                             for (int s = 0; s < steps; ++s) step();
                             if (steps == 1) Barrier(comm);
                           }) /
                           steps;
    if (comm.rank() != 0) continue;
    m.seconds.push_back(seconds);
    if (!limit) continue;
    const double after = limit();
    const double limit_here = (before + after) / 2;
    const double hosts = static_cast<double>(comm.size()) / RanksHere(comm.size());
    m.fractions.push_back(m.work / seconds / (limit_here * hosts));
  }
}

// What all ranks counted, as seen by rank 0 after they have ended.
struct Counted {
  explicit Counted(int ranks) : counters(Index(ranks)), peaks(Index(ranks)), pairs(Index(ranks)) {}

  std::vector<CommCounters> counters;
  std::vector<std::size_t> peaks;
  std::vector<std::int64_t> pairs;

  void Share(Communicator& comm) {
    FillIn<CommCounters>(comm, counters);
    FillIn<std::size_t>(comm, peaks);
    FillIn<std::int64_t>(comm, pairs);
  }

  void Fill(RankMeasurement& m) const {
    double sum = 0.0;
    for (std::size_t r = 0; r < counters.size(); ++r) {
      m.bytes = std::max(m.bytes, counters[r].bytes);
      m.messages = std::max(m.messages, counters[r].messages);
      m.rounds = std::max(m.rounds, counters[r].rounds);
      m.peak_bytes = std::max(m.peak_bytes, peaks[r]);
      m.balance = std::max(m.balance, static_cast<double>(pairs[r]));
      sum += static_cast<double>(pairs[r]);
    }
    m.balance = sum > 0 ? m.balance * static_cast<double>(pairs.size()) / sum : 0.0;
  }
};

// Some rows of what rank `rank` computed, against the oracle over whole sequences.
void CheckRows(const RankCase& c, const Problem& problem, int rank, const RankMemory& memory,
               RankMeasurement& m) {
  constexpr int kRows = 4;
  const AttentionSpec& spec = problem.spec();
  const auto dim = Index(spec.v_head_dim);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < std::min<std::size_t>(memory.out.size(), 4); ++i) {
    const std::size_t rows = memory.lse[i].size();
    if (rows == 0) continue;
    std::vector<std::int64_t> whole_rows;
    std::vector<float> out;
    std::vector<float> lse;
    for (int n = 0; n < kRows; ++n) {
      const std::size_t row = random() % rows;
      const auto token = static_cast<std::int64_t>(row) / spec.heads;
      const std::int64_t whole_token =
          c.work == RankWork::kDecode ? token : memory.shards[i][Index(rank)][token];
      whole_rows.push_back(whole_token * spec.heads + static_cast<std::int64_t>(row) % spec.heads);
      out.insert(out.end(), memory.out[i].begin() + static_cast<std::ptrdiff_t>(row * dim),
                 memory.out[i].begin() + static_cast<std::ptrdiff_t>((row + 1) * dim));
      lse.push_back(memory.lse[i][row]);
    }
    const auto want = reference::AttendRows(spec, problem.tasks()[i], whole_rows);
    const double error =
        std::max(reference::MaxError(out, want.out), reference::MaxError(lse, want.lse));
    m.max_error = std::max(m.max_error, error / reference::BoundGrowth(want.score_magnitude));
  }
}

RankMeasurement MeasureDecode(const RankCase& c, const RankTiming& timing) {
  const Problem problem(MakeShape(c, timing.seed));
  const AttentionSpec& spec = problem.spec();
  ThreadPool all_threads = HostPool(LimitThreads(c));
  const Context everything{.pool = &all_threads};
  RankMeasurement m;
  m.work = static_cast<double>(problem.kv_bytes());
  m.bound = Bound(Kernel::kDecode);
  Counted counted(c.ranks);
  RunOverRanks({c.ranks, timing.timeout, c.threads}, [&](Communicator& comm) {
    ThreadPool pool(c.threads);
    MemoryTracker tracker;
    CpuBackend backend({.pool = &pool, .memory = &tracker, .poll = ProgressOf(comm)});
    RankMemory memory = MakeMemory(c, problem, comm.rank(), tracker);
    const std::vector<ShardedTask> tasks = MakeTasks(c, problem, comm.rank(), memory);
    DecodeOptions options{c.schedule, c.node_size, c.reproducible};
    CostModel model = MeasureCost(comm, backend, c.node_size);
    if (timing.links) std::tie(model.within, model.between) = *timing.links;
    const auto step = [&] { Decode(comm, backend, spec, tasks, options); };
    if (comm.rank() == 0) m.predicted = PredictDecode(comm, spec, tasks, c.node_size, model);
    if (options.schedule == Schedule::kAuto) {
      options.schedule = ChooseDecode(comm, spec, tasks, c.node_size, model);
    }
    if (comm.rank() == 0) m.schedule = options.schedule;
    comm.ResetCounters();
    tracker.ResetPeaks();
    step();  // warm-up
    counted.counters[Index(comm.rank())] = comm.counters();
    counted.peaks[Index(comm.rank())] = tracker.peak();
    counted.pairs[Index(comm.rank())] = backend.pairs();
    Time(
        comm, timing, 1,
        [&] {
          return ReadBandwidth(everything, problem.kv_memory().data(), problem.kv_memory().size());
        },
        step, m);
    if (comm.rank() == 0) CheckRows(c, problem, 0, memory, m);
    counted.Share(comm);
    if (!c.reproducible) return;
    const DecodeOptions normal{options.schedule, options.node_size};
    for (int i = 0; i < timing.repeats; ++i) {
      const double plain = TimeStep(comm, [&] { Decode(comm, backend, spec, tasks, normal); });
      const double cost = TimeStep(comm, step) / plain;
      if (comm.rank() == 0) m.costs.push_back(cost);
    }
  });
  counted.Fill(m);
  return m;
}

RankMeasurement MeasureMerge(const RankCase& c, const RankTiming& timing) {
  const auto rows = Index(std::int64_t{c.batch} * c.heads);
  const auto dim = Index(c.head_dim);
  RankMeasurement m;
  m.bound = Bound(Kernel::kMerge);
  m.schedule = c.schedule;
  m.work = static_cast<double>(rows * (dim + 1) * sizeof(float));
  Counted counted(c.ranks);
  std::vector<std::vector<float>> outs(Index(c.ranks));
  std::vector<std::vector<float>> lses(Index(c.ranks));
  for (int r = 0; r < c.ranks; ++r) {
    std::mt19937_64 random(timing.seed + Index(r));
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < rows * dim; ++i) outs[Index(r)].push_back(normal(random));
    for (std::size_t i = 0; i < rows; ++i) lses[Index(r)].push_back(normal(random));
  }
  std::vector<double> want_out(rows * dim);
  std::vector<double> want_lse(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    double total = 0.0;
    for (std::size_t r = 0; r < outs.size(); ++r) {
      const double weight = std::exp(static_cast<double>(lses[r][row]));
      total += weight;
      for (std::size_t d = 0; d < dim; ++d) {
        want_out[row * dim + d] += weight * static_cast<double>(outs[r][row * dim + d]);
      }
    }
    for (std::size_t d = 0; d < dim; ++d) want_out[row * dim + d] /= total;
    want_lse[row] = std::log(total);
  }
  RunOverRanks({c.ranks, timing.timeout, c.threads}, [&](Communicator& comm) {
    ThreadPool pool(c.threads);
    MemoryTracker tracker;
    CpuBackend backend({.pool = &pool, .memory = &tracker, .poll = ProgressOf(comm)});
    std::vector<float> out = outs[Index(comm.rank())];
    std::vector<float> lse = lses[Index(comm.rank())];
    const Partial partial{out, lse, c.head_dim};
    const DecodeOptions options{c.schedule, c.node_size, c.reproducible};
    const auto step = [&] { ReducePartial(comm, backend, c.heads, partial, options); };
    step();
    if (comm.rank() == 0) {
      m.max_error =
          std::max(reference::MaxError(out, want_out), reference::MaxError(lse, want_lse));
    }
    comm.ResetCounters();
    tracker.ResetPeaks();
    step();
    counted.counters[Index(comm.rank())] = comm.counters();
    counted.peaks[Index(comm.rank())] = tracker.peak();
    Time(comm, timing, kMergeSteps, nullptr, step, m);
    counted.Share(comm);
  });
  counted.Fill(m);
  return m;
}

// MPI's own all-reduce of as many floats.
RankMeasurement MeasureMpiSum(const RankCase& c, const RankTiming& timing) {
  RankMeasurement m;
  m.bound = Bound(Kernel::kMerge);
  RunOverRanks({c.ranks, timing.timeout, c.threads}, [&](Communicator& comm) {
    const std::vector<float> ones(Index(std::int64_t{c.batch} * c.heads) * Index(c.head_dim + 1),
                                  1.0f);
    std::vector<float> sums(ones.size());
    const MpiSum sum_by_mpi = SumByMpi();
    const auto step = [&] { sum_by_mpi(ones, sums); };
    step();
    Time(comm, timing, kMergeSteps, nullptr, step, m);
    for (const float sum : sums) {
      m.max_error = std::max<double>(m.max_error, std::abs(sum - static_cast<float>(c.ranks)));
    }
  });
  return m;
}

// Whole tensors of a training step, for the oracle.
struct WholeBackward {
  std::vector<float> out;
  std::vector<float> lse;
  std::vector<float> d_out;
};

// Gradients of some tokens that a rank holds.
void CheckGradients(const AttentionSpec& spec, const Problem& problem, const WholeBackward& whole,
                    const Positions& own, const BackwardTask& local, RankMeasurement& m) {
  const AttendTask& task = problem.tasks()[0];
  BackwardTask oracle{.q = task.q,
                      .q_positions = task.q_positions,
                      .kv = task.kv,
                      .kv_positions = task.kv_positions,
                      .out = TensorView::Dense(whole.out.data(), DType::kF32, task.q.tokens,
                                               spec.heads, spec.v_head_dim),
                      .d_out = TensorView::Dense(whole.d_out.data(), DType::kF32, task.q.tokens,
                                                 spec.heads, spec.v_head_dim),
                      .lse = whole.lse,
                      .dq = {},
                      .dk = {},
                      .dv = {}};
  std::mt19937_64 random(2);
  for (int n = 0; n < 2; ++n) {
    const auto slot = static_cast<std::int64_t>(random() % Index(own.count()));
    const int head = static_cast<int>(random() % Index(spec.heads));
    const int kv_head = head / spec.group();
    const auto dq = reference::QueryGradient(spec, oracle, own[slot], head);
    const auto [dk, dv] = reference::KeyGradientOf(spec, oracle, own[slot], kv_head);
    const auto values = [](const GradView& view, std::int64_t t, int h) {
      return std::span<const float>(view.Row(t, h), Index(view.dim));
    };
    m.max_error = std::max({m.max_error, reference::MaxError(values(local.dq, slot, head), dq),
                            reference::MaxError(values(local.dk, slot, kv_head), dk),
                            reference::MaxError(values(local.dv, slot, kv_head), dv)});
  }
}

RankMeasurement MeasureRing(const RankCase& c, const RankTiming& timing) {
  const Problem problem(MakeShape(c, timing.seed));
  const AttentionSpec& spec = problem.spec();
  const bool train = c.work == RankWork::kTrain;
  ThreadPool all_threads = HostPool(LimitThreads(c));
  const Context everything{.pool = &all_threads};
  RankMeasurement m;
  m.schedule = c.schedule;
  const Kernel kernel = train ? Kernel::kBackward : Kernel::kForward;
  const Arithmetic arithmetic =
      ArithmeticOf(kernel, DefaultIsa(), problem.spec(), problem.shape().q_dtype, c.dtype);
  m.bound = Bound(kernel, arithmetic);
  m.work = 2.0 * static_cast<double>(problem.pairs()) * (spec.head_dim + spec.v_head_dim);
  if (train) {
    m.work +=
        2.0 * static_cast<double>(problem.pairs()) * (3.0 * spec.head_dim + 2.0 * spec.v_head_dim);
  }
  const std::size_t token_values = Index(std::int64_t{spec.heads} * spec.v_head_dim);
  std::vector<WholeBackward> whole(train ? problem.tasks().size() : 0);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const std::size_t tokens = Index(problem.tasks()[i].q.tokens);
    whole[i].out.resize(tokens * token_values);
    whole[i].lse.resize(tokens * Index(spec.heads));
    std::mt19937_64 random(timing.seed + 7);
    std::normal_distribution<float> normal;
    for (std::size_t d = 0; d < tokens * token_values; ++d)
      whole[i].d_out.push_back(normal(random));
  }
  Counted counted(c.ranks);
  RunOverRanks({c.ranks, timing.timeout, c.threads}, [&](Communicator& comm) {
    const int rank = comm.rank();
    ThreadPool pool(c.threads);
    MemoryTracker tracker;
    CpuBackend backend({.pool = &pool, .memory = &tracker, .poll = ProgressOf(comm)});
    RankMemory memory = MakeMemory(c, problem, rank, tracker);
    const std::vector<ShardedTask> tasks = MakeTasks(c, problem, rank, memory);
    std::vector<DealtRows> d_out;
    std::vector<std::vector<float>> gradients;
    std::vector<ShardedBackwardTask> backward;
    for (std::size_t i = 0; train && i < tasks.size(); ++i) {
      const Positions& own = memory.shards[i][Index(rank)];
      const std::int64_t n = own.count();
      d_out.push_back(DealRows(TensorView::Dense(whole[i].d_out.data(), DType::kF32, c.context,
                                                 spec.heads, spec.v_head_dim),
                               own));
      const auto gradient = [&](int heads, int dim) {
        std::vector<float>& values = gradients.emplace_back(Index(n * heads * dim));
        tracker.Add(Purpose::kResult, values.size() * sizeof(float));
        return GradView::Dense(values.data(), n, heads, dim);
      };
      backward.push_back({.local = {.q = tasks[i].local.q,
                                    .q_positions = own,
                                    .kv = tasks[i].local.kv,
                                    .kv_positions = own,
                                    .out = TensorView::Dense(memory.out[i].data(), DType::kF32, n,
                                                             spec.heads, spec.v_head_dim),
                                    .d_out = d_out[i].view,
                                    .lse = memory.lse[i],
                                    .dq = gradient(spec.heads, spec.head_dim),
                                    .dk = gradient(spec.kv_heads, spec.head_dim),
                                    .dv = gradient(spec.kv_heads, spec.v_head_dim)},
                          .kv_shards = memory.shards[i]});
    }
    const auto step_by = [&](Communicator& by) {
      Prefill(by, backend, spec, tasks, c.schedule);
      if (train) PrefillBackward(by, backend, spec, backward);
    };
    const auto step = [&] { step_by(comm); };
    comm.ResetCounters();
    tracker.ResetPeaks();
    step();  // warm-up; gradients start from 0 only here
    counted.counters[Index(rank)] = comm.counters();
    counted.peaks[Index(rank)] = tracker.peak();
    counted.pairs[Index(rank)] = backend.pairs();
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const Positions& own = memory.shards[i][Index(rank)];
      for (std::int64_t t = 0; t < own.count(); ++t) {
        const auto copy = [&](const std::vector<float>& part, std::size_t values,
                              std::vector<float>& target) {
          std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(Index(t) * values), values,
                      target.begin() + static_cast<std::ptrdiff_t>(Index(own[t]) * values));
        };
        copy(memory.out[i], token_values, whole[i].out);
        copy(memory.lse[i], Index(spec.heads), whole[i].lse);
      }
    }
    Barrier(comm);
    for (WholeBackward& w : whole) {
      FillIn<float>(comm, w.out);
      FillIn<float>(comm, w.lse);
    }
    if (rank == 0) {
      CheckRows(c, problem, 0, memory, m);
      if (train && memory.shards[0][0].count() > 0) {
        CheckGradients(spec, problem, whole[0], memory.shards[0][0], backward[0].local, m);
      }
    }
    Barrier(comm);
    comm.ResetCounters();
    tracker.ResetPeaks();
    const std::int64_t pairs = backend.pairs();
    step();
    counted.counters[Index(rank)] = comm.counters();
    counted.peaks[Index(rank)] = tracker.peak();
    counted.pairs[Index(rank)] = backend.pairs() - pairs;
    Time(
        comm, timing, 1, [&] { return Peak(everything, arithmetic); }, step, m);
    if (timing.overlap && c.ranks > 1) {
      const Overlap overlap = MeasureOverlap(comm, timing.repeats, step_by);
      if (rank == 0) m.overlap = overlap;
    }
    counted.Share(comm);
  });
  counted.Fill(m);
  return m;
}

}  // namespace

std::string_view Name(RankWork work) {
  switch (work) {
    case RankWork::kDecode:
      return "decode";
    case RankWork::kMerge:
      return "merge";
    case RankWork::kMpiSum:
      return "mpi-sum";
    case RankWork::kPrefill:
      return "prefill";
    case RankWork::kTrain:
      return "train";
  }
  return "?";
}

RankMeasurement MeasureRanks(const RankCase& c, const RankTiming& timing) {
  switch (c.work) {
    case RankWork::kDecode:
      return MeasureDecode(c, timing);
    case RankWork::kMerge:
      return MeasureMerge(c, timing);
    case RankWork::kMpiSum:
      return MeasureMpiSum(c, timing);
    case RankWork::kPrefill:
    case RankWork::kTrain:
      return MeasureRing(c, timing);
  }
  return {};
}

}  // namespace treeline::cli
