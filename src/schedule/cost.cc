#include "schedule/cost.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"
#include "schedule/nodes.h"
#include "schedule/packed_partial.h"

namespace treeline {
namespace {

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

int FloorLog2(int n) { return static_cast<int>(std::bit_width(static_cast<unsigned>(n))) - 1; }
bool IsPowerOfTwo(int n) { return std::has_single_bit(static_cast<unsigned>(n)); }

// Messages on the critical path of an all-reduce, and those of the busiest rank.
struct AllReduceSteps {
  explicit AllReduceSteps(int n)
      : rounds(FloorLog2(n)), sends(IsPowerOfTwo(n) ? FloorLog2(n) : FloorLog2(n) + 1) {
    const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
    if (n > core) rounds += n - core > core / 2 ? 2 : 1;  // see AllReduce
  }

  int rounds;
  int sends;
};

double Seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

// Seconds of one way of a message of so many bytes between ranks a and b.
double MeasureMessage(Communicator& comm, int a, int b, std::size_t bytes, int repeats) {
  std::vector<std::byte> out(bytes);
  std::vector<std::byte> in(bytes);
  double best = 0.0;
  for (int i = 0; i < repeats && (comm.rank() == a || comm.rank() == b); ++i) {
    const int peer = comm.rank() == a ? b : a;
    const auto start = std::chrono::steady_clock::now();
    if (comm.rank() == a) {
      comm.Exchange(out, peer, {}, kNoRank);
      comm.Exchange({}, kNoRank, in, peer);
    } else {
      comm.Exchange({}, kNoRank, in, peer);
      comm.Exchange(out, peer, {}, kNoRank);
    }
    const double seconds = Seconds(std::chrono::steady_clock::now() - start) / 2;
    if (i == 1 || seconds < best) best = seconds;  // the first is a warm-up
  }
  return best;
}

// In about 0.05 s, or 30 latencies if that is longer.
LinkCost MeasureLink(Communicator& comm, int a, int b) {
  const double small = MeasureMessage(comm, a, b, 8, 12);
  constexpr std::size_t kSample = 16 << 10;
  const double sample = std::max(MeasureMessage(comm, a, b, kSample, 3) - small, 1e-9);
  // As many bytes as take some milliseconds, within bounds. Rank a decides, and tells all: what
  // ranks measured differs a little.
  constexpr double kTime = 4e-3;
  constexpr double kLarge = 1 << 20;
  std::array<double, 3> cost{
      small, std::clamp(kTime / sample * kSample, static_cast<double>(kSample), kLarge), 0.0};
  Broadcast(comm, a, std::as_writable_bytes(std::span(cost)));
  const double large = MeasureMessage(comm, a, b, static_cast<std::size_t>(cost[1]), 4);
  cost[2] = std::max(large - cost[0], 1e-9);
  Broadcast(comm, a, std::as_writable_bytes(std::span(cost)));
  return {.latency = cost[0], .bytes_per_second = std::floor(cost[1]) / cost[2]};
}

}  // namespace

PredictedCost Predict(Schedule schedule, const DecodeTraffic& shape, const CostModel& model) {
  const int n = shape.ranks;
  const std::int64_t rows = shape.tokens * shape.heads;
  const std::int64_t partial = rows * shape.row_bytes;
  const LinkCost& slow = shape.nodes == 1 ? model.within : model.between;
  const AllReduceSteps tree(n);
  PredictedCost cost{
      .schedule = schedule,
      .bytes = 0,
      .rounds = 0,
      .attend = static_cast<double>(shape.kv_bytes) / n / model.attend_bytes_per_second,
      .merge = 0.0,
      .network = 0.0};
  // Parts that a rank merges, in partials of all rows; and bytes on the critical path.
  double merged = 0.0;
  double path_bytes = 0.0;
  switch (schedule) {
    case Schedule::kTree:
    case Schedule::kTree3: {
      const std::int64_t value =
          schedule == Schedule::kTree ? partial : rows * (shape.row_bytes + 4);
      const int phases = schedule == Schedule::kTree ? 1 : 3;
      cost.rounds = std::int64_t{phases} * tree.rounds;
      cost.bytes = tree.sends * value;
      path_bytes = static_cast<double>(tree.rounds * value);
      merged = 2.0 * tree.rounds;
      break;
    }
    case Schedule::kGather:
      cost.rounds = n > 1 ? 1 : 0;
      cost.bytes = (n - 1) * partial;
      path_bytes = static_cast<double>(cost.bytes);
      merged = n;
      break;
    case Schedule::kHeads: {
      const std::int64_t share = CeilDiv(rows, n) * shape.row_bytes;
      cost.rounds = n > 1 ? 2 : 0;
      cost.bytes = n > 1 ? partial - share + (n - 1) * share : 0;
      path_bytes = static_cast<double>(cost.bytes);
      merged = 1.0;
      break;
    }
    case Schedule::kTwoLevel: {
      const int node = shape.largest_node;
      const AllReduceSteps between(shape.nodes);
      const int local = node > 1 ? 2 : 0;
      cost.rounds = local + between.rounds;
      cost.bytes = (between.sends + node - 1) * partial;
      cost.network = local * model.within.latency + 2.0 *
                                                        static_cast<double>((node - 1) * partial) /
                                                        model.within.bytes_per_second;
      cost.network +=
          between.rounds * model.between.latency +
          static_cast<double>(between.rounds * partial) / model.between.bytes_per_second;
      merged = node + 2.0 * between.rounds;
      break;
    }
    case Schedule::kRingKv:
      cost.rounds = n - 1;
      cost.bytes = shape.kv_bytes / n * (n - 1);
      path_bytes = static_cast<double>(cost.bytes);
      cost.attend *= n;
      merged = n;
      break;
    case Schedule::kRingQ: {
      const std::int64_t home = CeilDiv(shape.tokens, n) * shape.heads * shape.row_bytes;
      cost.rounds = n > 1 ? n : 0;
      cost.bytes = n > 1 ? partial - home + (n - 1) * home : 0;
      path_bytes = static_cast<double>((n - 1) * home * 2);
      merged = 2.0 * (n - 1);
      break;
    }
    case Schedule::kAuto:
      Throw<ArgumentError>("schedule auto is none by itself");
  }
  cost.merge = n > 1 ? merged * static_cast<double>(partial) / model.merge_bytes_per_second : 0.0;
  if (schedule != Schedule::kTwoLevel) {
    cost.network =
        static_cast<double>(cost.rounds) * slow.latency + path_bytes / slow.bytes_per_second;
  }
  return cost;
}

std::vector<PredictedCost> PredictDecode(const Communicator& comm, const AttentionSpec& spec,
                                         std::span<const ShardedTask> tasks, int node_size,
                                         const CostModel& model) {
  const Nodes nodes(comm, node_size);
  DecodeTraffic shape{.ranks = comm.size(),
                      .nodes = nodes.count(),
                      .largest_node = nodes.largest(),
                      .tokens = 0,
                      .heads = spec.heads,
                      .row_bytes = 4 * (std::int64_t{spec.v_head_dim} + 1),
                      .kv_bytes = 0};
  for (const ShardedTask& task : tasks) {
    shape.tokens += task.local.q.tokens;
    const std::size_t slot_bytes = RowBytes(task.local.kv.dtype, spec.head_dim) +
                                   RowBytes(task.local.kv.dtype, spec.v_head_dim);
    for (const Positions& shard : task.kv_shards) {
      shape.kv_bytes += shard.count() * spec.kv_heads * static_cast<std::int64_t>(slot_bytes);
    }
  }
  std::vector<PredictedCost> costs;
  for (const Schedule schedule : kDecodeSchedules) {
    costs.push_back(Predict(schedule, shape, model));
  }
  std::stable_sort(costs.begin(), costs.end(), [](const PredictedCost& a, const PredictedCost& b) {
    return a.seconds() < b.seconds();
  });
  return costs;
}

Schedule ChooseDecode(Communicator& comm, const AttentionSpec& spec,
                      std::span<const ShardedTask> tasks, int node_size, const CostModel& model) {
  Schedule choice = Schedule::kTree;
  RunCollective(comm, [&] {
    comm.SetStep("choose", Signature().Add(node_size).value());
    if (comm.rank() == 0) {
      choice = PredictDecode(comm, spec, tasks, node_size, model).front().schedule;
    }
    Broadcast(comm, 0, std::as_writable_bytes(std::span(&choice, 1)));
  });
  return choice;
}

CostModel MeasureCost(Communicator& comm, Backend& backend, int node_size) {
  CostModel model;
  RunCollective(comm, [&] {
    const Nodes nodes(comm, node_size);
    comm.SetStep("measure", Signature().Add(node_size).value());
    // Within the first node that has two ranks; between the first two nodes.
    const std::vector<int> leaders = nodes.leaders();
    const auto pair = std::find_if(leaders.begin(), leaders.end(),
                                   [&](int rank) { return nodes.With(rank).size() > 1; });
    if (pair != leaders.end()) model.within = MeasureLink(comm, *pair, nodes.With(*pair)[1]);
    model.between = leaders.size() > 1 ? MeasureLink(comm, leaders[0], leaders[1]) : model.within;
    if (pair == leaders.end()) model.within = model.between;
    // A merge of two partials of a few thousand rows, on all ranks at the same time.
    constexpr std::size_t kRows = 256;
    constexpr int kDim = 128;
    const PackedPartial a(backend, kRows, kDim, Purpose::kWorkspace);
    const PackedPartial b(backend, kRows, kDim, Purpose::kWorkspace);
    for (const Partial& part : {a.all(), b.all()}) {
      std::fill(part.out.begin(), part.out.end(), 1.0f);
      std::fill(part.lse.begin(), part.lse.end(), 0.0f);
    }
    const std::array<Partial, 2> parts{a.all(), b.all()};
    double best = 0.0;
    for (int i = 0; i < 5; ++i) {
      const auto start = std::chrono::steady_clock::now();
      backend.Merge(parts, a.all());
      const double seconds = Seconds(std::chrono::steady_clock::now() - start);
      if (i == 1 || seconds < best) best = seconds;
    }
    model.merge_bytes_per_second = static_cast<double>(2 * a.bytes().size()) / std::max(best, 1e-9);
    Broadcast(comm, 0, std::as_writable_bytes(std::span(&model, 1)));
  });
  return model;
}

}  // namespace treeline
