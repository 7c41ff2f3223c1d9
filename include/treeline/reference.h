#pragma once

#include <span>
#include <vector>

#include "treeline/attention.h"

namespace treeline::reference {

// The oracle: attention in float64 and plain loops, from the same inputs as the kernels. Slow.

struct Result {
  std::vector<double> out;  // [tokens, heads, v_head_dim]
  std::vector<double> lse;  // [tokens, heads]
  // Largest scale * sum_d |q_d k_d| + |bias| of any visible pair: how far rounding may be
  // amplified.
  double score_magnitude = 0.0;
};

enum class Sinks : bool { kLeaveOut, kInclude };

// Ignores task.result.
Result Attend(const AttentionSpec& spec, const AttendTask& task, Sinks sinks = Sinks::kLeaveOut);

// Only the given rows, in that order: row = token * heads + head.
Result AttendRows(const AttentionSpec& spec, const AttendTask& task,
                  std::span<const std::int64_t> rows, Sinks sinks = Sinks::kLeaveOut);

struct Gradients {
  std::vector<double> dq;      // [tokens, heads, head_dim]
  std::vector<double> dk;      // [slots, kv_heads, head_dim]
  std::vector<double> dv;      // [slots, kv_heads, v_head_dim]
  std::vector<double> dsinks;  // [heads], empty without sinks
};

// Gradients for d_out, from a forward pass of its own in float64. Reads q, kv, positions and d_out.
Gradients Backward(const AttentionSpec& spec, const BackwardTask& task);

// The gradient of one query row, from the out and lse that the task gives: what a kernel should
// make of the same inputs, without the cost of all rows.
std::vector<double> QueryGradient(const AttentionSpec& spec, const BackwardTask& task,
                                  std::int64_t token, int head);

// Likewise of one key and its value.
struct KeyGradient {
  std::vector<double> dk;  // [head_dim]
  std::vector<double> dv;  // [v_head_dim]
};
KeyGradient KeyGradientOf(const AttentionSpec& spec, const BackwardTask& task, std::int64_t slot,
                          int kv_head);

// max |a - b| / max(1, max |b|): the error of a tensor. A NaN or infinity in one alone is infinite.
double MaxError(std::span<const float> actual, std::span<const double> expected);

// The factor by which error bounds grow for scores beyond 16: max(1, score_magnitude / 16).
double BoundGrowth(double score_magnitude);

}  // namespace treeline::reference
