#include <algorithm>

#include "backend/cpu/attend_classes.h"
#include "backend/cpu/parallel.h"
#include "core/check.h"
#include "treeline/backend.h"

namespace treeline {
namespace {

template <class Task>
std::int64_t CountPairs(const AttentionSpec& spec, std::span<const Task> tasks) {
  std::int64_t pairs = 0;
  for (const Task& task : tasks) {
    for (std::int64_t t = 0; t < task.q.tokens; ++t) {
      pairs += Visible(spec, task.q_positions[t], task.kv_positions).size();
    }
  }
  return pairs * spec.heads;
}

}  // namespace

TrackedBuffer CpuBackend::Allocate(std::size_t bytes, Purpose purpose) {
  return {bytes, purpose, context_.memory};
}

void CpuBackend::Attend(const AttentionSpec& spec, std::span<const AttendTask> tasks) {
  treeline::Attend(spec, tasks, context_);
  pairs_ += CountPairs(spec, tasks);
}

void CpuBackend::AttendBackward(const AttentionSpec& spec, std::span<const BackwardTask> tasks) {
  treeline::AttendBackward(spec, tasks, context_);
  pairs_ += CountPairs(spec, tasks);
}

void CpuBackend::AttendClasses(const AttentionSpec& spec, const AttendTask& task, int classes,
                               std::span<float> parts) {
  cpu::AttendClasses(spec, task, classes, parts, context_);
  pairs_ += CountPairs(spec, std::span(&task, 1));
}

void CpuBackend::Merge(std::span<const Partial> parts, const Partial& target) {
  treeline::Merge(parts, target, context_);
}

void CpuBackend::Add(std::span<float> target, std::span<const float> source) {
  constexpr std::size_t kValuesPerItem = 1 << 16;
  Require(target.size() == source.size(), "cannot add ", source.size(), " values to ",
          target.size());
  const std::size_t items = (target.size() + kValuesPerItem - 1) / kValuesPerItem;
  cpu::ForEach(context_, static_cast<std::int64_t>(items), [&](std::int64_t item, int) {
    const std::size_t begin = static_cast<std::size_t>(item) * kValuesPerItem;
    const std::size_t end = std::min(begin + kValuesPerItem, target.size());
    for (std::size_t i = begin; i < end; ++i) target[i] += source[i];
  });
}

}  // namespace treeline
