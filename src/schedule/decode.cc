#include <algorithm>
#include <vector>

#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/kv_ring.h"
#include "schedule/reduce.h"
#include "treeline/cost.h"

namespace treeline {
namespace {

// The rows of all tasks, one task after the other.
std::size_t CountRows(const AttentionSpec& spec, std::span<const ShardedTask> tasks) {
  std::size_t rows = 0;
  for (const ShardedTask& task : tasks) {
    rows += static_cast<std::size_t>(task.local.q.tokens) * static_cast<std::size_t>(spec.heads);
  }
  return rows;
}

// Calls fn(task, its rows of `packed`).
template <class Fn>
void ForEachTask(std::span<const ShardedTask> tasks, const PackedPartial& packed, const Fn& fn) {
  std::size_t row = 0;
  for (const ShardedTask& task : tasks) {
    const std::size_t end = row + task.local.result.rows();
    fn(task, packed.Rows(row, end));
    row = end;
  }
}

// Reproducible decoding: keys are in 64 classes, by position modulo 64. A rank of p holds whole
// classes, those that are the same modulo p. It reduces each apart, merges those 32, 16, …, p
// apart, and what is left to merge is p / 2, …, 1 apart: a tree over ranks.
constexpr int kClasses = 64;

void RequireReproducible(const Communicator& comm, std::span<const ShardedTask> tasks,
                         const DecodeOptions& options) {
  const int ranks = comm.size();
  Require(kClasses % ranks == 0, "reproducible decoding needs a number of ranks that divides ",
          kClasses, "; there are ", ranks);
  Require(options.schedule == Schedule::kTree || options.schedule == Schedule::kGather,
          "reproducible decoding needs schedule tree or gather, not ", Name(options.schedule));
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const Positions& own = tasks[i].local.kv_positions;
    const std::int64_t first = own.count() > 0 ? own[0] : 0;
    const Positions striped =
        Positions::Strided({.first = first, .run = 1, .stride = ranks, .count = own.count()});
    Require(first < ranks && SamePositions(own, striped), "task ", i,
            ": reproducible decoding needs keys that are striped by single tokens");
  }
}

// task.result := the partial of this rank's classes, merged as the tree has it.
void AttendReproducibly(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                        const AttendTask& task) {
  const int classes = kClasses / comm.size();
  const std::size_t rows = task.result.rows();
  const std::size_t bytes = PackedPartial::Bytes(rows, spec.v_head_dim);
  const TrackedBuffer buffer =
      backend.Allocate(bytes * static_cast<std::size_t>(classes), Purpose::kWorkspace);
  backend.AttendClasses(spec, task, classes,
                        {reinterpret_cast<float*>(buffer.data()), buffer.size() / sizeof(float)});
  std::vector<Partial> parts;
  parts.reserve(static_cast<std::size_t>(classes));
  for (int c = 0; c < classes; ++c) {
    parts.push_back(
        PartialAt(buffer.data() + static_cast<std::size_t>(c) * bytes, rows, spec.v_head_dim));
  }
  MergeAsTree(backend, parts);
  Copy(parts[0], task.result);
}

// Each rank attends to its own keys; the partials are reduced.
void DecodeByPartials(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                      std::span<const ShardedTask> tasks, const DecodeOptions& options) {
  const PackedPartial packed(backend, CountRows(spec, tasks), spec.v_head_dim, Purpose::kResult);
  std::vector<AttendTask> local;
  ForEachTask(tasks, packed, [&](const ShardedTask& task, const Partial& rows) {
    local.push_back(task.local);
    local.back().result = rows;
  });
  if (options.reproducible) {
    for (const AttendTask& task : local) AttendReproducibly(comm, backend, spec, task);
  } else {
    backend.Attend(spec, local);
  }
  Reduce(comm, backend, spec.heads, packed, options);
  ForEachTask(tasks, packed,
              [&](const ShardedTask& task, const Partial& rows) { Copy(rows, task.local.result); });
}

// Each rank attends to the keys of all. The partials of the blocks are merged in the order of their
// owners, not of their arrival, so that all ranks get the same bits.
void DecodeByRing(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                  std::span<const ShardedTask> tasks) {
  std::vector<KvShard> shards;
  for (const ShardedTask& task : tasks) shards.push_back({task.local.kv, task.kv_shards});
  std::vector<PackedPartial> parts;
  parts.reserve(static_cast<std::size_t>(comm.size()));
  for (int r = 0; r < comm.size(); ++r) {
    parts.emplace_back(backend, CountRows(spec, tasks), spec.v_head_dim, Purpose::kWorkspace);
  }
  KvRing ring(comm, backend, spec, shards);
  ring.Run([&](const KvBlock& block) {
    std::vector<AttendTask> local;
    ForEachTask(tasks, parts[static_cast<std::size_t>(block.owner)],
                [&](const ShardedTask& task, const Partial& rows) {
                  const std::size_t i = local.size();
                  local.push_back(task.local);
                  local[i].kv = block.views[i];
                  local[i].kv_positions = block.positions[i];
                  local[i].result = rows;
                });
    backend.Attend(spec, local);
  });
  std::size_t row = 0;
  for (const ShardedTask& task : tasks) {
    const std::size_t end = row + task.local.result.rows();
    std::vector<Partial> rows;
    rows.reserve(parts.size());
    for (const PackedPartial& part : parts) rows.push_back(part.Rows(row, end));
    backend.Merge(rows, task.local.result);
    row = end;
  }
}

void RequireTask(const Communicator& comm, const AttentionSpec& spec, const ShardedTask& task,
                 std::size_t index) {
  const auto rows =
      static_cast<std::size_t>(task.local.q.tokens) * static_cast<std::size_t>(spec.heads);
  Require(task.local.result.rows() == rows, "task ", index, " has ", task.local.result.rows(),
          " rows of result; ", task.local.q.tokens, " tokens of ", spec.heads, " heads need ",
          rows);
  RequireShards(comm, task.kv_shards, task.local.kv_positions, index, "key");
}

}  // namespace

void Decode(Communicator& comm, Backend& backend, const AttentionSpec& spec,
            std::span<const ShardedTask> tasks, const DecodeOptions& options) {
  if (options.schedule == Schedule::kAuto) {
    DecodeOptions chosen = options;
    chosen.schedule = ChooseDecode(comm, spec, tasks, options.node_size, {});
    return Decode(comm, backend, spec, tasks, chosen);
  }
  RunCollective(comm, [&] {
    Validate(spec);
    Signature signature;
    signature.Add(spec).Add(options.schedule).Add(options.node_size).Add(options.reproducible);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      RequireTask(comm, spec, tasks[i], i);
      signature.Add(tasks[i].local.q.tokens).Add(tasks[i].local.kv.dtype).Add(tasks[i].kv_shards);
    }
    if (options.reproducible) RequireReproducible(comm, tasks, options);
    comm.SetStep("decode", signature.value());
    if (options.schedule == Schedule::kRingKv) {
      DecodeByRing(comm, backend, spec, tasks);
    } else {
      DecodeByPartials(comm, backend, spec, tasks, options);
    }
    for (const ShardedTask& task : tasks) ApplySinks(spec, task.local.result);
  });
}

void ReducePartial(Communicator& comm, Backend& backend, int heads, const Partial& partial,
                   const DecodeOptions& options) {
  RunCollective(comm, [&] {
    Require(heads >= 1 && partial.rows() % static_cast<std::size_t>(heads) == 0, "heads is ", heads,
            "; it must divide the ", partial.rows(), " rows");
    Signature signature;
    signature.Add(heads).Add(partial.rows()).Add(partial.v_head_dim).Add(options.schedule);
    signature.Add(options.node_size).Add(options.reproducible);
    comm.SetStep("merge", signature.value());
    const PackedPartial packed(backend, partial.rows(), partial.v_head_dim, Purpose::kResult);
    Copy(partial, packed.all());
    Reduce(comm, backend, heads, packed, options);
    Copy(packed.all(), partial);
  });
}

}  // namespace treeline
