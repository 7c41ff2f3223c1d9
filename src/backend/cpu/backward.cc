#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "backend/cpu/parallel.h"
#include "backend/cpu/validate.h"
#include "core/check.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/turns.h"
#include "treeline/attention.h"
#include "treeline/memory.h"

namespace treeline {

void AttendBackward(const AttentionSpec& spec, std::span<const BackwardTask> tasks,
                    const Context& context) {
  Validate(spec);
  Require(spec.head_dim <= AttentionSpec::kMaxBackwardHeadDim &&
              spec.v_head_dim <= AttentionSpec::kMaxBackwardHeadDim,
          "head_dim is ", spec.head_dim, " and v_head_dim ", spec.v_head_dim,
          "; gradients need at most ", AttentionSpec::kMaxBackwardHeadDim);
  const cpu::KernelTable& table = cpu::TableFor(context);
  // Items of task i are [first[i], first[i + 1]): blocks in order, and within each all key heads.
  // Blocks of one head add to the same rows in turns: threads seldom meet there, while there are
  // more heads than threads.
  std::vector<std::int64_t> first{0};
  std::vector<std::int64_t> keys_of_block;
  std::size_t bytes = 0;  // of a thread's workspace
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    cpu::ValidateTask(spec, tasks[i], i);
    const cpu::BackwardBlock block = table.backward_block(spec, tasks[i]);
    const std::int64_t blocks =
        tasks[i].q.tokens == 0 ? 0 : (tasks[i].kv.slots + block.keys - 1) / block.keys;
    first.push_back(first.back() + blocks * spec.kv_heads);
    keys_of_block.push_back(block.keys);
    bytes = std::max(bytes, (block.workspace_bytes + 63) / 64 * 64);
  }
  const std::int64_t items = first.back();
  Require(items < std::numeric_limits<std::uint32_t>::max(), "the batch has ", items,
          " blocks of keys; it must have fewer than 2^32");

  const int threads = cpu::Threads(context);
  cpu::Turns turns(threads);
  const TrackedBuffer workspace(bytes * static_cast<std::size_t>(threads), Purpose::kWorkspace,
                                context.memory);
  cpu::ForEach(context, items, [&](std::int64_t item, int thread) {
    const auto after = std::upper_bound(first.begin(), first.end(), item);
    const auto index = static_cast<std::size_t>(after - first.begin()) - 1;
    const BackwardTask& task = tasks[index];
    const std::int64_t local = item - first[index];
    const std::int64_t keys = keys_of_block[index];
    const std::int64_t begin = local / spec.kv_heads * keys;
    const auto number = static_cast<std::uint32_t>(item);
    std::optional<std::uint32_t> predecessor;
    if (begin > 0) predecessor = number - static_cast<std::uint32_t>(spec.kv_heads);
    table.backward({.spec = &spec,
                    .task = &task,
                    .kv_head = static_cast<int>(local % spec.kv_heads),
                    .key_begin = begin,
                    .keys = static_cast<int>(std::min(keys, task.kv.slots - begin)),
                    .turns = &turns,
                    .item = number,
                    .predecessor = predecessor,
                    .workspace = workspace.data() + bytes * static_cast<std::size_t>(thread)});
  });
}

void SinksBackward(const AttentionSpec& spec, const TensorView& out, const TensorView& d_out,
                   std::span<const float> lse, std::span<float> d_sinks) {
  Validate(spec);
  const auto heads = static_cast<std::size_t>(spec.heads);
  Require(!spec.sinks.empty(), "the spec has no sinks");
  Require(d_sinks.size() == heads, "d_sinks has ", d_sinks.size(), " values; it must have ", heads);
  cpu::ValidateOutput("out", spec, out, out.tokens);
  cpu::ValidateOutput("d_out", spec, d_out, out.tokens);
  const std::size_t rows = static_cast<std::size_t>(out.tokens) * heads;
  Require(lse.size() == rows, "lse has ", lse.size(), " values; it must have ", rows);
  for (std::size_t h = 0; h < heads; ++h) {
    double sum = 0.0;  // one value from all tokens: worth the wider type
    for (std::int64_t t = 0; t < out.tokens; ++t) {
      const auto* o = reinterpret_cast<const float*>(out.Row(t, static_cast<int>(h)));
      const auto* g = reinterpret_cast<const float*>(d_out.Row(t, static_cast<int>(h)));
      double dot = 0.0;
      for (int d = 0; d < spec.v_head_dim; ++d) dot += static_cast<double>(o[d]) * g[d];
      sum += std::exp(static_cast<double>(spec.sinks[h]) -
                      lse[static_cast<std::size_t>(t) * heads + h]) *
             dot;
    }
    d_sinks[h] -= static_cast<float>(sum);
  }
}

}  // namespace treeline
