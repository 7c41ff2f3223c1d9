#include "backend/cpu/attend_classes.h"

#include <algorithm>

#include "backend/cpu/parallel.h"
#include "backend/cpu/validate.h"
#include "core/check.h"
#include "kernels/cpu/kernel_table.h"
#include "treeline/memory.h"

namespace treeline::cpu {
namespace {

constexpr std::size_t kWorkspace = 1 << 20;  // a thread's
constexpr int kMaxClasses = 64;

// Pieces of a task: parts of its key heads, of the rows that share one, and of its classes. None of
// them changes any bits.
struct Grid {
  int head_parts;
  int row_parts;
  int class_parts;

  std::int64_t items() const { return std::int64_t{head_parts} * row_parts * class_parts; }
};

// Part `index` of `parts` of [0, count).
struct Part {
  int begin;
  int end;
};
Part PartOf(int count, int parts, std::int64_t index) {
  return {static_cast<int>(count * index / parts), static_cast<int>(count * (index + 1) / parts)};
}

}  // namespace

void AttendClasses(const AttentionSpec& spec, const AttendTask& task, int classes,
                   std::span<float> parts, const Context& context) {
  Validate(spec);
  ValidateTask(spec, task, 0);
  Require(classes >= 1 && classes <= kMaxClasses, "classes is ", classes, "; it must be from 1 to ",
          kMaxClasses);
  const std::size_t result_rows = task.result.rows();
  const std::size_t class_floats = result_rows * (static_cast<std::size_t>(spec.v_head_dim) + 1);
  Require(parts.size() == class_floats * static_cast<std::size_t>(classes), "parts has ",
          parts.size(), " values; ", classes, " classes of ", result_rows, " rows need ",
          class_floats * static_cast<std::size_t>(classes));
  if (result_rows == 0) return;

  const KernelTable& table = TableFor(context);
  const int rows = static_cast<int>(task.q.tokens * spec.group());
  Grid grid{1, (rows + static_cast<int>(kDecodeRows) - 1) / static_cast<int>(kDecodeRows), 1};
  const auto workspace = [&] {
    const auto most = [](int count, int of) { return (count + of - 1) / of; };
    return table.decode_workspace(spec, {.kv_heads = most(spec.kv_heads, grid.head_parts),
                                         .rows = most(rows, grid.row_parts),
                                         .classes = classes,
                                         .own_classes = most(classes, grid.class_parts)});
  };
  // A piece reads whole slots where the heads of a slot are neighbours, and whole heads otherwise.
  const bool heads_inner = task.kv.k.head_stride < task.kv.k.slot_stride;
  int& first = heads_inner ? grid.class_parts : grid.head_parts;
  int& second = heads_inner ? grid.head_parts : grid.class_parts;
  const int first_most = heads_inner ? classes : spec.kv_heads;
  const int second_most = heads_inner ? spec.kv_heads : classes;
  const auto too_large = [&] {
    return workspace() > kWorkspace || grid.items() < std::int64_t{2} * Threads(context);
  };
  while (too_large() && first < first_most) ++first;
  while (too_large() && second < second_most) ++second;

  const std::size_t bytes = (workspace() + 63) / 64 * 64;
  const TrackedBuffer memory(bytes * static_cast<std::size_t>(Threads(context)),
                             Purpose::kWorkspace, context.memory);
  ForEach(context, grid.items(), [&](std::int64_t item, int thread) {
    const Part heads = PartOf(spec.kv_heads, grid.head_parts, item % grid.head_parts);
    item /= grid.head_parts;
    const Part own_rows = PartOf(rows, grid.row_parts, item % grid.row_parts);
    const Part own_classes = PartOf(classes, grid.class_parts, item / grid.row_parts);
    table.decode({.spec = &spec,
                  .task = &task,
                  .kv_head_begin = heads.begin,
                  .kv_head_end = heads.end,
                  .row_begin = own_rows.begin,
                  .row_end = own_rows.end,
                  .slots = {0, task.kv.slots},
                  .in_order = true,
                  .classes = classes,
                  .class_begin = own_classes.begin,
                  .class_end = own_classes.end,
                  .out = parts.data(),
                  .lse = parts.data() + result_rows * static_cast<std::size_t>(spec.v_head_dim),
                  .class_stride = class_floats,
                  .workspace = memory.data() + bytes * static_cast<std::size_t>(thread)});
  });
}

}  // namespace treeline::cpu
