// Queries that are spread over the ranks, as keys are.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/kv_ring.h"
#include "schedule/packed_partial.h"

namespace treeline {
namespace {

bool SeesAny(const AttentionSpec& spec, const AttendTask& task) {
  for (std::int64_t t = 0; t < task.q.tokens; ++t) {
    if (Visible(spec, task.q_positions[t], task.kv_positions).size() > 0) return true;
  }
  return false;
}

// Attends to more keys: task.result := task.result (+) attention over the task's keys. Tasks that
// see none of them are left out.
class Accumulator {
 public:
  Accumulator(Backend& backend, const AttentionSpec& spec, std::size_t most_rows)
      : backend_(backend),
        spec_(spec),
        scratch_(backend, most_rows, spec.v_head_dim, Purpose::kWorkspace) {}

  void Add(std::span<const AttendTask> tasks) {
    std::vector<AttendTask> seeing;
    std::vector<std::array<Partial, 2>> merges;
    std::size_t row = 0;
    for (const AttendTask& task : tasks) {
      if (!SeesAny(spec_, task)) continue;
      const Partial part = scratch_.Rows(row, row + task.result.rows());
      row += task.result.rows();
      merges.push_back({task.result, part});
      seeing.push_back(task);
      seeing.back().result = part;
    }
    if (seeing.empty()) return;
    backend_.Attend(spec_, seeing);
    for (const auto& parts : merges) backend_.Merge(parts, parts[0]);
  }

 private:
  Backend& backend_;
  const AttentionSpec& spec_;
  const PackedPartial scratch_;
};

// The keys go round; each rank keeps its rows.
void PrefillByKeys(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                   std::span<const ShardedTask> tasks) {
  std::vector<KvShard> shards;
  std::size_t rows = 0;
  for (const ShardedTask& task : tasks) {
    shards.push_back({task.local.kv, task.kv_shards});
    rows += task.local.result.rows();
  }
  Accumulator accumulator(backend, spec, comm.size() > 1 ? rows : 0);
  KvRing ring(comm, backend, spec, shards);
  ring.Run([&](const KvBlock& block) {
    std::vector<AttendTask> local;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      local.push_back(tasks[i].local);
      local[i].kv = block.views[i];
      local[i].kv_positions = block.positions[i];
    }
    if (block.owner == comm.rank()) {
      backend.Attend(spec, local);  // the first block: it overwrites
    } else {
      accumulator.Add(local);
    }
  });
}

// Rows of every rank in turn, with their partials so far: q of each task, then the partial of all
// rows, in one buffer.
class TravellingRows {
 public:
  TravellingRows(const Communicator& comm, const AttentionSpec& spec,
                 std::span<const ShardedTask> tasks)
      : comm_(comm), spec_(spec), tasks_(tasks) {}

  std::int64_t Tokens(std::size_t task, int owner) const {
    return tasks_[task].q_shards[static_cast<std::size_t>(owner)].count();
  }
  std::size_t Rows(int owner) const {
    std::size_t tokens = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      tokens += static_cast<std::size_t>(Tokens(i, owner));
    }
    return tokens * static_cast<std::size_t>(spec_.heads);
  }
  // A multiple of 16: a row is a multiple of 8 elements of at least 2 bytes.
  std::size_t QueryBytes(int owner) const {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) bytes += QueryBytes(i, owner);
    return bytes;
  }
  std::size_t PartialBytes(int owner) const {
    return PackedPartial::Bytes(Rows(owner), spec_.v_head_dim);
  }
  std::size_t MostBytes() const {
    std::size_t most = 0;
    for (int r = 0; r < comm_.size(); ++r) most = std::max(most, QueryBytes(r) + PartialBytes(r));
    return most;
  }
  std::size_t MostRows() const {
    std::size_t most = 0;
    for (int r = 0; r < comm_.size(); ++r) most = std::max(most, Rows(r));
    return most;
  }

  // This rank's rows.
  void Pack(std::byte* target) const {
    for (const ShardedTask& task : tasks_) {
      const TensorView& q = task.local.q;
      const std::size_t row = RowBytes(q.dtype, q.dim);
      for (std::int64_t t = 0; t < q.tokens; ++t) {
        for (int h = 0; h < q.heads; ++h) {
          std::memcpy(target, q.Row(t, h), row);
          target += row;
        }
      }
    }
    ForEachResult(target, comm_.rank(), [](const ShardedTask& task, const Partial& rows) {
      Copy(task.local.result, rows);
    });
  }

  // The rows that lie at `source`, over this rank's keys.
  std::vector<AttendTask> TasksAt(std::byte* source, int owner) const {
    std::vector<AttendTask> tasks;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      AttendTask task = tasks_[i].local;
      task.q =
          TensorView::Dense(source, task.q.dtype, Tokens(i, owner), spec_.heads, spec_.head_dim);
      task.q_positions = tasks_[i].q_shards[static_cast<std::size_t>(owner)];
      source += QueryBytes(i, owner);
      tasks.push_back(task);
    }
    std::size_t i = 0;
    ForEachResult(source, owner,
                  [&](const ShardedTask&, const Partial& rows) { tasks[i++].result = rows; });
    return tasks;
  }

  // This rank's finished partials, which lie at `source`.
  void Unpack(std::byte* source) const {
    ForEachResult(source, comm_.rank(), [](const ShardedTask& task, const Partial& rows) {
      Copy(rows, task.local.result);
    });
  }

 private:
  std::size_t QueryBytes(std::size_t task, int owner) const {
    return static_cast<std::size_t>(Tokens(task, owner)) * static_cast<std::size_t>(spec_.heads) *
           RowBytes(tasks_[task].local.q.dtype, spec_.head_dim);
  }

  template <class Fn>
  void ForEachResult(std::byte* bytes, int owner, const Fn& fn) const {
    const Partial all = PartialAt(bytes, Rows(owner), spec_.v_head_dim);
    const auto dim = static_cast<std::size_t>(spec_.v_head_dim);
    std::size_t row = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      const std::size_t count =
          static_cast<std::size_t>(Tokens(i, owner)) * static_cast<std::size_t>(spec_.heads);
      fn(tasks_[i], Partial{all.out.subspan(row * dim, count * dim), all.lse.subspan(row, count),
                            spec_.v_head_dim});
      row += count;
    }
  }

  const Communicator& comm_;
  const AttentionSpec& spec_;
  const std::span<const ShardedTask> tasks_;
};

// The rows go round; each rank keeps its keys. N rounds: the last brings partials home.
void PrefillByRows(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                   std::span<const ShardedTask> tasks) {
  const int n = comm.size();
  const int rank = comm.rank();
  std::vector<AttendTask> local;
  for (const ShardedTask& task : tasks) local.push_back(task.local);
  backend.Attend(spec, local);
  if (n == 1) return;

  const TravellingRows rows(comm, spec, tasks);
  Accumulator accumulator(backend, spec, rows.MostRows());
  const std::array<TrackedBuffer, 2> buffers{
      backend.Allocate(rows.MostBytes(), Purpose::kInFlight),
      backend.Allocate(rows.MostBytes(), Purpose::kInFlight)};
  const int to = (rank + 1) % n;
  const int from = (rank + n - 1) % n;
  std::byte* current = buffers[0].data();
  std::byte* other = buffers[1].data();
  int owner = rank;
  rows.Pack(current);
  for (int step = 1; step < n; ++step) {
    const int next_owner = (rank + n - step) % n;
    comm.Exchange({current, rows.QueryBytes(owner) + rows.PartialBytes(owner)}, to,
                  {other, rows.QueryBytes(next_owner) + rows.PartialBytes(next_owner)}, from);
    std::swap(current, other);
    owner = next_owner;
    accumulator.Add(rows.TasksAt(current, owner));
  }
  comm.Exchange({current + rows.QueryBytes(owner), rows.PartialBytes(owner)}, to,
                {other, rows.PartialBytes(rank)}, from);
  rows.Unpack(other);
}

}  // namespace

void Prefill(Communicator& comm, Backend& backend, const AttentionSpec& spec,
             std::span<const ShardedTask> tasks, Schedule schedule) {
  RunCollective(comm, [&] {
    Validate(spec);
    Require(schedule == Schedule::kRingKv || schedule == Schedule::kRingQ, "schedule ",
            Name(schedule), " is not for prefill; that takes ring-kv or ring-q");
    Signature signature;
    signature.Add(spec).Add(schedule);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      RequireShards(comm, tasks[i].kv_shards, tasks[i].local.kv_positions, i, "key");
      signature.Add(tasks[i].local.kv.dtype).Add(tasks[i].kv_shards);
      if (schedule == Schedule::kRingQ) {
        RequireShards(comm, tasks[i].q_shards, tasks[i].local.q_positions, i, "query");
        signature.Add(tasks[i].local.q.dtype).Add(tasks[i].q_shards);
      }
    }
    comm.SetStep("prefill", signature.value());
    if (schedule == Schedule::kRingKv) {
      PrefillByKeys(comm, backend, spec, tasks);
    } else {
      PrefillByRows(comm, backend, spec, tasks);
    }
    for (const ShardedTask& task : tasks) ApplySinks(spec, task.local.result);
  });
}

}  // namespace treeline
