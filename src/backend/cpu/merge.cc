#include <algorithm>
#include <array>
#include <cmath>

#include "backend/cpu/parallel.h"
#include "core/check.h"
#include "kernels/cpu/kernel_table.h"
#include "treeline/partial.h"

namespace treeline {
namespace {

// Rows that one thread merges at a time, in values read.
constexpr std::size_t kValuesPerItem = 1 << 15;

void RequirePartial(const Partial& partial, const char* name) {
  Require(partial.v_head_dim >= 8 && partial.v_head_dim <= AttentionSpec::kMaxHeadDim &&
              partial.v_head_dim % 8 == 0,
          name, " has v_head_dim ", partial.v_head_dim, "; it must be a multiple of 8 from 8 to ",
          AttentionSpec::kMaxHeadDim);
  Require(partial.out.size() == partial.rows() * static_cast<std::size_t>(partial.v_head_dim), name,
          " has ", partial.out.size(), " values for ", partial.rows(), " rows of ",
          partial.v_head_dim);
}

}  // namespace

void Merge(std::span<const Partial> parts, const Partial& target, const Context& context) {
  RequirePartial(target, "the target");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    RequirePartial(parts[i], "a part");
    Require(parts[i].rows() == target.rows() && parts[i].v_head_dim == target.v_head_dim, "part ",
            i, " has ", parts[i].rows(), " rows of ", parts[i].v_head_dim, "; the target has ",
            target.rows(), " rows of ", target.v_head_dim);
  }
  if (parts.empty()) {
    std::fill(target.out.begin(), target.out.end(), 0.0f);
    std::fill(target.lse.begin(), target.lse.end(), kNoKeys);
    return;
  }
  const cpu::KernelTable& table = cpu::TableFor(context);
  if (parts.size() > cpu::kMaxMergeParts) {
    // In steps, each starting from the result so far. The target may be one of the later parts, so
    // the result so far needs a place of its own.
    std::vector<float> out(target.out.size());
    std::vector<float> lse(target.lse.size());
    const Partial so_far{out, lse, target.v_head_dim};
    Merge(parts.first(cpu::kMaxMergeParts), so_far, context);
    std::vector<Partial> rest{so_far};
    const auto tail = parts.subspan(cpu::kMaxMergeParts);
    rest.insert(rest.end(), tail.begin(), tail.end());
    Merge(rest, target, context);
    return;
  }
  const std::size_t values_per_row = parts.size() * static_cast<std::size_t>(target.v_head_dim);
  const std::size_t rows_per_item = std::max<std::size_t>(kValuesPerItem / values_per_row, 1);
  const std::size_t items = (target.rows() + rows_per_item - 1) / rows_per_item;
  cpu::ForEach(context, static_cast<std::int64_t>(items), [&](std::int64_t item, int) {
    const std::size_t begin = static_cast<std::size_t>(item) * rows_per_item;
    table.merge({.parts = parts.data(),
                 .count = parts.size(),
                 .target = &target,
                 .row_begin = begin,
                 .row_end = std::min(begin + rows_per_item, target.rows())});
  });
}

void MergeInto(const Partial& accumulator, const Partial& other, const Context& context) {
  const std::array<Partial, 2> parts{accumulator, other};
  Merge(parts, accumulator, context);
}

void ApplySinks(const AttentionSpec& spec, const Partial& partial) {
  Validate(spec);
  if (spec.sinks.empty()) return;
  RequirePartial(partial, "the partial");
  const auto heads = static_cast<std::size_t>(spec.heads);
  const auto dim = static_cast<std::size_t>(spec.v_head_dim);
  Require(partial.v_head_dim == spec.v_head_dim && partial.rows() % heads == 0, "the partial has ",
          partial.rows(), " rows of ", partial.v_head_dim, "; the spec has ", heads, " heads of ",
          dim);
  for (std::size_t row = 0; row < partial.rows(); ++row) {
    // A merge with (out = 0, lse = sink).
    const float sink = spec.sinks[row % heads];
    const float lse = partial.lse[row];
    if (std::isnan(lse)) continue;
    const float highest = std::max(lse, sink);
    const float weight = std::exp(lse - highest);
    const float total = weight + std::exp(sink - highest);
    for (float& x : partial.out.subspan(row * dim, dim)) x *= weight / total;
    partial.lse[row] = highest + std::log(total);
  }
}

}  // namespace treeline
