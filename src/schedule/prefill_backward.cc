// Gradients over a ring. Keys and values go round as in the forward pass; behind them, one step
// later, go their gradients, to which each rank adds its own and which come home after N hops.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"
#include "schedule/kv_ring.h"

namespace treeline {
namespace {

class BackwardRing {
 public:
  BackwardRing(Communicator& comm, Backend& backend, const AttentionSpec& spec,
               std::span<const ShardedBackwardTask> tasks)
      : comm_(comm),
        backend_(backend),
        spec_(spec),
        tasks_(tasks),
        to_((comm.rank() + 1) % comm.size()),
        from_((comm.rank() + comm.size() - 1) % comm.size()) {
    for (const ShardedBackwardTask& task : tasks) {
      shards_.push_back({task.local.kv, task.kv_shards});
    }
  }

  void Run() {
    if (comm_.size() == 1) {
      std::vector<BackwardTask> local;
      for (const ShardedBackwardTask& task : tasks_) local.push_back(task.local);
      backend_.AttendBackward(spec_, local);
      return;
    }
    KvRing ring(comm_, backend_, spec_, shards_);
    std::size_t most = 0;
    for (int r = 0; r < comm_.size(); ++r) most = std::max(most, Values(r));
    for (TrackedBuffer& buffer : travelling_) {
      buffer = backend_.Allocate(most * sizeof(float), Purpose::kInFlight);
    }
    own_ = backend_.Allocate(most * sizeof(float), Purpose::kWorkspace);
    ring.Run([&](const KvBlock& block) { Visit(block); });
    // What this rank got last is complete once it has been sent home; its own comes back.
    transfer_->Wait();
    AddHome();
  }

 private:
  // Values of the gradients of a rank's keys and values.
  std::size_t Values(int owner) const {
    std::size_t slots = 0;
    for (const KvShard& shard : shards_) {
      slots += static_cast<std::size_t>(shard.shards[static_cast<std::size_t>(owner)].count());
    }
    return slots * static_cast<std::size_t>(spec_.kv_heads) *
           static_cast<std::size_t>(spec_.head_dim + spec_.v_head_dim);
  }

  float* Floats(const TrackedBuffer& buffer) const {
    return reinterpret_cast<float*>(buffer.data());
  }

  // Calls fn(task index, dk, dv) for the gradients of a block that lie at `values`.
  template <class Fn>
  void ForEachGradient(float* values, int owner, const Fn& fn) const {
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      const std::int64_t slots = shards_[i].shards[static_cast<std::size_t>(owner)].count();
      const GradView dk = GradView::Dense(values, slots, spec_.kv_heads, spec_.head_dim);
      values += slots * spec_.kv_heads * spec_.head_dim;
      const GradView dv = GradView::Dense(values, slots, spec_.kv_heads, spec_.v_head_dim);
      values += slots * spec_.kv_heads * spec_.v_head_dim;
      fn(i, dk, dv);
    }
  }

  void Visit(const KvBlock& block) {
    const std::size_t values = Values(block.owner);
    const bool first = block.owner == comm_.rank();
    float* target = Floats(first ? travelling_[0] : own_);
    std::memset(target, 0, values * sizeof(float));
    std::vector<BackwardTask> local;
    ForEachGradient(target, block.owner,
                    [&](std::size_t i, const GradView& dk, const GradView& dv) {
                      local.push_back(tasks_[i].local);
                      local[i].kv = block.views[i];
                      local[i].kv_positions = block.positions[i];
                      local[i].dk = dk;
                      local[i].dv = dv;
                    });
    backend_.AttendBackward(spec_, local);
    const std::size_t current = arrived_ % 2;
    if (!first) {
      transfer_->Wait();  // what the ranks before this one have added up
      backend_.Add({Floats(travelling_[current]), values}, {Floats(own_), values});
    }
    // On to the next rank; the last of them is the block's owner.
    const int next_owner = (block.owner + comm_.size() - 1) % comm_.size();
    piece_ = {travelling_[current].data(), values * sizeof(float)};
    transfer_ = comm_.Start(
        {.send = {&piece_, 1},
         .to = to_,
         .receive = {travelling_[current ^ 1].data(), Values(next_owner) * sizeof(float)},
         .from = from_});
    ++arrived_;
  }

  void AddHome() {
    float* home = Floats(travelling_[arrived_ % 2]);
    const auto add = [&](const GradView& from, const GradView& to) {
      for (std::int64_t slot = 0; slot < from.tokens; ++slot) {
        for (int head = 0; head < from.heads; ++head) {
          const auto dim = static_cast<std::size_t>(from.dim);
          const float* source = from.Row(slot, head);
          float* target = to.Row(slot, head);
          for (std::size_t d = 0; d < dim; ++d) target[d] += source[d];
        }
      }
    };
    ForEachGradient(home, comm_.rank(), [&](std::size_t i, const GradView& dk, const GradView& dv) {
      add(dk, tasks_[i].local.dk);
      add(dv, tasks_[i].local.dv);
    });
  }

  Communicator& comm_;
  Backend& backend_;
  const AttentionSpec& spec_;
  const std::span<const ShardedBackwardTask> tasks_;
  const int to_;
  const int from_;
  std::vector<KvShard> shards_;
  std::array<TrackedBuffer, 2> travelling_;  // gradients of a block, summed over ranks so far
  TrackedBuffer own_;                        // this rank's part of a block's gradients
  std::size_t arrived_ = 0;
  ConstBytes piece_;
  // Destroyed before the buffers above: nobody copies from or to them afterwards.
  std::unique_ptr<Transfer> transfer_;
};

void SumSinkGradients(Communicator& comm, const AttentionSpec& spec,
                      std::span<const ShardedBackwardTask> tasks, std::span<float> d_sinks) {
  std::vector<float> sum(d_sinks.size());
  std::vector<float> scratch(d_sinks.size());
  for (const ShardedBackwardTask& task : tasks) {
    SinksBackward(spec, task.local.out, task.local.d_out, task.local.lse, sum);
  }
  AllReduce(comm, std::as_writable_bytes(std::span(sum)),
            std::as_writable_bytes(std::span(scratch)), [&](Bytes, ConstBytes) {
              for (std::size_t h = 0; h < sum.size(); ++h) sum[h] += scratch[h];
            });
  for (std::size_t h = 0; h < sum.size(); ++h) d_sinks[h] += sum[h];
}

}  // namespace

void PrefillBackward(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                     std::span<const ShardedBackwardTask> tasks, std::span<float> d_sinks) {
  RunCollective(comm, [&] {
    Validate(spec);
    Require(d_sinks.empty() || d_sinks.size() == spec.sinks.size(), "d_sinks has ", d_sinks.size(),
            " values; the spec has ", spec.sinks.size(), " sinks");
    Signature signature;
    signature.Add(spec).Add(d_sinks.size());
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      RequireShards(comm, tasks[i].kv_shards, tasks[i].local.kv_positions, i, "key");
      signature.Add(tasks[i].local.kv.dtype).Add(tasks[i].kv_shards);
    }
    comm.SetStep("prefill backward", signature.value());
    BackwardRing(comm, backend, spec, tasks).Run();
    if (!d_sinks.empty()) SumSinkGradients(comm, spec, tasks, d_sinks);
  });
}

}  // namespace treeline
