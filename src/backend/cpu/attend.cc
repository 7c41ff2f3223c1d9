#include <algorithm>
#include <vector>

#include "backend/cpu/parallel.h"
#include "backend/cpu/validate.h"
#include "kernels/cpu/kernel_table.h"
#include "treeline/attention.h"
#include "treeline/memory.h"

namespace treeline {
namespace cpu {
namespace {

// A thread's share of memory: what a decode item packs, and the partials of split tasks.
constexpr std::size_t kDecodeWorkspace = 1 << 20;
constexpr std::size_t kSplitBytes = 1 << 19;
// Items a thread gets on average, so that uneven ones balance.
constexpr std::int64_t kItemsPerThread = 4;
// A split reads at least this many slots, a multiple of the decode kernel's largest group.
constexpr std::int64_t kSplitSlots = 512;

// How one task is cut into items. Items are numbered head part, then split; or key head, then row
// block from the last (under causality the longest) to the first.
struct Plan {
  std::int64_t first_item = 0;
  std::int64_t items = 0;
  bool decode = false;
  // decode
  SlotRange slots;               // all that any row sees
  std::int64_t splits = 1;       // of the slots
  std::int64_t head_parts = 1;   // of the key heads
  std::size_t parts_offset = 0;  // of the splits' partials, in floats; splits > 1 only
  // forward
  std::int64_t block_rows = 0;
  std::int64_t row_blocks = 0;
};

SlotRange VisibleToAny(const AttentionSpec& spec, const AttendTask& task) {
  SlotRange any{task.kv.slots, 0};
  for (std::int64_t t = 0; t < task.q.tokens; ++t) {
    const SlotRange range = Visible(spec, task.q_positions[t], task.kv_positions);
    if (range.size() == 0) continue;
    any.begin = std::min(any.begin, range.begin);
    any.end = std::max(any.end, range.end);
  }
  return any.size() > 0 ? any : SlotRange{};
}

std::size_t PartialFloats(const AttentionSpec& spec, const AttendTask& task) {
  return task.result.rows() * (static_cast<std::size_t>(spec.v_head_dim) + 1);
}

class Attention {
 public:
  Attention(const AttentionSpec& spec, std::span<const AttendTask> tasks, const Context& context)
      : spec_(spec), tasks_(tasks), context_(context), table_(TableFor(context)) {
    MakePlans();
  }

  void Run() {
    const int threads = Threads(context_);
    workspace_ = TrackedBuffer(workspace_bytes_ * static_cast<std::size_t>(threads),
                               Purpose::kWorkspace, context_.memory);
    parts_ = TrackedBuffer(part_floats_ * sizeof(float), Purpose::kWorkspace, context_.memory);
    ForEach(context_, items_, [this](std::int64_t item, int thread) { RunItem(item, thread); });
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      if (plans_[i].splits > 1) MergeSplits(tasks_[i], plans_[i]);
    }
  }

 private:
  // Query rows that share a key head.
  std::int64_t Rows(const AttendTask& task) const { return task.q.tokens * spec_.group(); }

  // As many rows as the kernel takes at once, or fewer, so that there is work for all threads.
  void ChooseBlockRows() {
    constexpr std::int64_t kLeast = 96;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      if (plans_[i].decode) continue;
      const ForwardBlock block = table_.forward_block(spec_, tasks_[i]);
      plans_[i].block_rows = block.rows;
      workspace_bytes_ = std::max(workspace_bytes_, block.workspace_bytes);
    }
    for (bool smaller = true; smaller && CountBlocks() < std::int64_t{2} * Threads(context_);) {
      smaller = false;
      for (Plan& plan : plans_) {
        if (plan.block_rows <= kLeast) continue;
        plan.block_rows /= 2;
        smaller = true;
      }
    }
  }

  // Sets the row blocks of all forward tasks; returns the pieces that they make.
  std::int64_t CountBlocks() {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      Plan& plan = plans_[i];
      if (plan.decode) continue;
      plan.row_blocks = (Rows(tasks_[i]) + plan.block_rows - 1) / plan.block_rows;
      count += plan.row_blocks;
    }
    return count * spec_.kv_heads;
  }

  void MakePlans() {
    plans_.resize(tasks_.size());
    std::int64_t total_slots = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      plans_[i].decode = Rows(tasks_[i]) <= kDecodeRows;
      if (!plans_[i].decode) continue;
      plans_[i].slots = VisibleToAny(spec_, tasks_[i]);
      total_slots += plans_[i].slots.size();
    }
    ChooseBlockRows();
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      Plan& plan = plans_[i];
      plan.first_item = items_;
      if (plan.decode) {
        PlanDecode(tasks_[i], total_slots, plan);
      } else {
        plan.items = spec_.kv_heads * plan.row_blocks;
      }
      items_ += plan.items;
    }
  }

  void PlanDecode(const AttendTask& task, std::int64_t total_slots, Plan& plan) {
    const auto workspace = [&](std::int64_t parts) {
      const std::int64_t heads = (spec_.kv_heads + parts - 1) / parts;
      return table_.decode_workspace(
          spec_, {.kv_heads = static_cast<int>(heads), .rows = static_cast<int>(Rows(task))});
    };
    while (plan.head_parts < spec_.kv_heads && workspace(plan.head_parts) > kDecodeWorkspace) {
      ++plan.head_parts;
    }
    const int threads = Threads(context_);
    if (threads > 1 && total_slots > 0 && plan.slots.size() > 0) {
      // The task's share of all items, as far as its slots and the memory allow.
      const std::int64_t share =
          (kItemsPerThread * threads * plan.slots.size() + total_slots - 1) / total_slots;
      const auto budget = static_cast<std::int64_t>(
          kSplitBytes * static_cast<std::size_t>(threads) / sizeof(float) - part_floats_);
      const auto floats = static_cast<std::int64_t>(PartialFloats(spec_, task));
      plan.splits = std::min({share, plan.slots.size() / kSplitSlots, budget / floats,
                              static_cast<std::int64_t>(kMaxMergeParts)});
      plan.splits = std::max<std::int64_t>(plan.splits, 1);
      const std::int64_t parts = (share + plan.splits - 1) / plan.splits;
      plan.head_parts = std::clamp<std::int64_t>(parts, plan.head_parts, spec_.kv_heads);
      if (plan.splits > 1) {
        plan.parts_offset = part_floats_;
        part_floats_ += static_cast<std::size_t>(plan.splits * floats);
      }
    }
    plan.items = plan.head_parts * plan.splits;
    workspace_bytes_ = std::max(workspace_bytes_, (workspace(plan.head_parts) + 63) / 64 * 64);
  }

  void RunItem(std::int64_t item, int thread) const {
    const auto after =
        std::upper_bound(plans_.begin(), plans_.end(), item,
                         [](std::int64_t i, const Plan& plan) { return i < plan.first_item; });
    // Tasks without items share their first item with the next one; the last of them has it.
    const auto index = static_cast<std::size_t>(after - plans_.begin()) - 1;
    const Plan& plan = plans_[index];
    std::byte* workspace = workspace_.data() + workspace_bytes_ * static_cast<std::size_t>(thread);
    const std::int64_t local = item - plan.first_item;
    if (plan.decode) {
      RunDecode(tasks_[index], plan, local, workspace);
    } else {
      RunForward(tasks_[index], plan, local, workspace);
    }
  }

  void RunForward(const AttendTask& task, const Plan& plan, std::int64_t item,
                  std::byte* workspace) const {
    const std::int64_t rows = Rows(task);
    const std::int64_t begin = (plan.row_blocks - 1 - item % plan.row_blocks) * plan.block_rows;
    table_.forward({.spec = &spec_,
                    .task = &task,
                    .kv_head = static_cast<int>(item / plan.row_blocks),
                    .row_begin = begin,
                    .rows = static_cast<int>(std::min(plan.block_rows, rows - begin)),
                    .workspace = workspace});
  }

  void RunDecode(const AttendTask& task, const Plan& plan, std::int64_t item,
                 std::byte* workspace) const {
    const std::int64_t part = item / plan.splits;
    const std::int64_t split = item % plan.splits;
    const Partial target = plan.splits > 1 ? Split(task, plan, split) : task.result;
    table_.decode({.spec = &spec_,
                   .task = &task,
                   .kv_head_begin = static_cast<int>(part * spec_.kv_heads / plan.head_parts),
                   .kv_head_end = static_cast<int>((part + 1) * spec_.kv_heads / plan.head_parts),
                   .row_begin = 0,
                   .row_end = static_cast<int>(Rows(task)),
                   .slots = {SplitBegin(plan, split), SplitBegin(plan, split + 1)},
                   .out = target.out.data(),
                   .lse = target.lse.data(),
                   .workspace = workspace});
  }

  static std::int64_t SplitBegin(const Plan& plan, std::int64_t split) {
    if (split == plan.splits) return plan.slots.end;
    const std::int64_t even = plan.slots.size() * split / plan.splits;
    return plan.slots.begin + even / kSplitSlots * kSplitSlots;
  }

  Partial Split(const AttendTask& task, const Plan& plan, std::int64_t split) const {
    const std::size_t rows = task.result.rows();
    const std::size_t out_size = task.result.out.size();
    float* base = reinterpret_cast<float*>(parts_.data()) + plan.parts_offset +
                  static_cast<std::size_t>(split) * PartialFloats(spec_, task);
    return {{base, out_size}, {base + out_size, rows}, spec_.v_head_dim};
  }

  void MergeSplits(const AttendTask& task, const Plan& plan) const {
    std::vector<Partial> parts;
    for (std::int64_t split = 0; split < plan.splits; ++split) {
      parts.push_back(Split(task, plan, split));
    }
    Merge(parts, task.result, context_);
  }

  const AttentionSpec& spec_;
  const std::span<const AttendTask> tasks_;
  const Context& context_;
  const KernelTable& table_;
  std::vector<Plan> plans_;
  std::int64_t items_ = 0;
  std::size_t workspace_bytes_ = 0;
  std::size_t part_floats_ = 0;
  TrackedBuffer workspace_;  // workspace_bytes_ a thread
  TrackedBuffer parts_;
};

}  // namespace
}  // namespace cpu

void Attend(const AttentionSpec& spec, std::span<const AttendTask> tasks, const Context& context) {
  Validate(spec);
  for (std::size_t i = 0; i < tasks.size(); ++i) cpu::ValidateTask(spec, tasks[i], i);
  cpu::Attention(spec, tasks, context).Run();
}

}  // namespace treeline
