#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "treeline/reference.h"

namespace treeline::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

double AbsoluteDot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::fabs(static_cast<double>(a[i]) * b[i]);
  return sum;
}

struct Score {
  double value;
  double slope;      // d value / d (scale * q.k): 1, or 1 - tanh^2 under a softcap
  double magnitude;  // scale * sum |q_d k_d| + |bias|
};

Score ScoreOf(const AttentionSpec& spec, int head, std::int64_t distance, std::span<const float> q,
              std::span<const float> k) {
  Score score{spec.scale * Dot(q, k), 1.0, std::fabs(spec.scale) * AbsoluteDot(q, k)};
  if (spec.softcap > 0.0f) {
    const double t = std::tanh(score.value / spec.softcap);
    score.value = spec.softcap * t;
    score.slope = 1.0 - t * t;
  }
  if (!spec.alibi_slopes.empty()) {
    const double bias =
        spec.alibi_slopes[static_cast<std::size_t>(head)] * static_cast<double>(distance);
    score.value -= bias;
    score.magnitude += std::fabs(bias);
  }
  return score;
}

// One query row and everything of its softmax.
struct Row {
  std::vector<float> q;
  SlotRange visible;
  std::vector<float> keys;    // [visible.size(), head_dim], widened exactly
  std::vector<float> values;  // [visible.size(), v_head_dim]
  std::vector<double> p;      // [visible.size()], normalised
  std::vector<double> slope;  // [visible.size()], see Score
  std::vector<double> out;
  double lse = -kInfinity;
  double p_sink = 0.0;
  double score_magnitude = 0.0;

  std::span<const float> Key(std::size_t j) const { return {&keys[j * q.size()], q.size()}; }
  std::span<const float> Value(std::size_t j) const {
    return {&values[j * out.size()], out.size()};
  }
};

// Needs q, q_positions, kv and kv_positions of a task.
template <class Task>
Row ComputeRow(const AttentionSpec& spec, const Task& task, std::int64_t token, int head,
               Sinks sinks) {
  Row row;
  const int kv_head = head / spec.group();
  const std::int64_t position = task.q_positions[token];
  row.visible = Visible(spec, position, task.kv_positions);
  const auto seen = static_cast<std::size_t>(row.visible.size());
  row.q.resize(static_cast<std::size_t>(spec.head_dim));
  row.out.assign(static_cast<std::size_t>(spec.v_head_dim), 0.0);
  row.keys.resize(seen * row.q.size());
  row.values.resize(seen * row.out.size());
  DecodeRow(task.q.dtype, task.q.Row(token, head), row.q);

  std::vector<double> scores;
  for (std::size_t j = 0; j < seen; ++j) {
    const std::int64_t slot = row.visible.begin + static_cast<std::int64_t>(j);
    DecodeRow(task.kv.dtype, task.kv.KeyRow(slot, kv_head),
              {&row.keys[j * row.q.size()], row.q.size()});
    DecodeRow(task.kv.dtype, task.kv.ValueRow(slot, kv_head),
              {&row.values[j * row.out.size()], row.out.size()});
    const Score score =
        ScoreOf(spec, head, std::abs(position - task.kv_positions[slot]), row.q, row.Key(j));
    scores.push_back(score.value);
    row.slope.push_back(score.slope);
    row.score_magnitude = std::max(row.score_magnitude, score.magnitude);
  }

  const bool with_sink = sinks == Sinks::kInclude && !spec.sinks.empty();
  const double sink = with_sink ? spec.sinks[static_cast<std::size_t>(head)] : -kInfinity;
  double highest = sink;
  for (double s : scores) highest = std::max(highest, s);
  if (highest == -kInfinity &&
      std::none_of(scores.begin(), scores.end(), [](double s) { return std::isnan(s); })) {
    row.p.assign(scores.size(), 0.0);
    return row;  // no key at all, or none with any weight
  }
  double sum = with_sink ? std::exp(sink - highest) : 0.0;
  for (double s : scores) sum += std::exp(s - highest);
  row.lse = highest + std::log(sum);
  row.p_sink = with_sink ? std::exp(sink - highest) / sum : 0.0;
  for (double s : scores) row.p.push_back(std::exp(s - highest) / sum);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    for (std::size_t d = 0; d < row.out.size(); ++d) row.out[d] += row.p[j] * row.Value(j)[d];
  }
  return row;
}

}  // namespace

Result AttendRows(const AttentionSpec& spec, const AttendTask& task,
                  std::span<const std::int64_t> rows, Sinks sinks) {
  Result result;
  for (std::int64_t r : rows) {
    const Row row = ComputeRow(spec, task, r / spec.heads, static_cast<int>(r % spec.heads), sinks);
    result.out.insert(result.out.end(), row.out.begin(), row.out.end());
    result.lse.push_back(row.lse);
    result.score_magnitude = std::max(result.score_magnitude, row.score_magnitude);
  }
  return result;
}

Result Attend(const AttentionSpec& spec, const AttendTask& task, Sinks sinks) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(task.q.tokens * spec.heads));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  return AttendRows(spec, task, rows, sinks);
}

Gradients Backward(const AttentionSpec& spec, const BackwardTask& task) {
  const auto qk_dim = static_cast<std::size_t>(spec.head_dim);
  const auto v_dim = static_cast<std::size_t>(spec.v_head_dim);
  const auto q_rows = static_cast<std::size_t>(task.q.tokens * spec.heads);
  const auto kv_rows = static_cast<std::size_t>(task.kv.slots * spec.kv_heads);
  Gradients g;
  g.dq.assign(q_rows * qk_dim, 0.0);
  g.dk.assign(kv_rows * qk_dim, 0.0);
  g.dv.assign(kv_rows * v_dim, 0.0);
  g.dsinks.assign(spec.sinks.size(), 0.0);

  for (std::int64_t token = 0; token < task.q.tokens; ++token) {
    for (int head = 0; head < spec.heads; ++head) {
      const Row row = ComputeRow(spec, task, token, head, Sinks::kInclude);
      std::vector<float> d_out(v_dim);
      DecodeRow(task.d_out.dtype, task.d_out.Row(token, head), d_out);
      double delta = 0.0;  // d_out . out
      for (std::size_t d = 0; d < v_dim; ++d) delta += d_out[d] * row.out[d];
      if (!g.dsinks.empty()) g.dsinks[static_cast<std::size_t>(head)] -= row.p_sink * delta;

      double* dq = &g.dq[static_cast<std::size_t>(token * spec.heads + head) * qk_dim];
      for (std::size_t j = 0; j < row.p.size(); ++j) {
        const auto slot = static_cast<std::size_t>(row.visible.begin) + j;
        const std::size_t kv_row = slot * static_cast<std::size_t>(spec.kv_heads) +
                                   static_cast<std::size_t>(head / spec.group());
        const double d_p = Dot(d_out, row.Value(j));
        const double d_score = row.p[j] * (d_p - delta) * row.slope[j] * spec.scale;
        for (std::size_t d = 0; d < qk_dim; ++d) {
          dq[d] += d_score * row.Key(j)[d];
          g.dk[kv_row * qk_dim + d] += d_score * row.q[d];
        }
        for (std::size_t d = 0; d < v_dim; ++d) g.dv[kv_row * v_dim + d] += row.p[j] * d_out[d];
      }
    }
  }
  return g;
}

namespace {

std::vector<float> ReadRow(DType dtype, const void* row, int dim) {
  std::vector<float> values(static_cast<std::size_t>(dim));
  DecodeRow(dtype, row, values);
  return values;
}

// One query row and one key of a backward task, and what they give each other.
struct Pair {
  Pair(const AttentionSpec& spec, const BackwardTask& task, std::int64_t token, int head,
       std::int64_t slot)
      : q(ReadRow(task.q.dtype, task.q.Row(token, head), spec.head_dim)),
        k(ReadRow(task.kv.dtype, task.kv.KeyRow(slot, head / spec.group()), spec.head_dim)),
        d_out(ReadRow(DType::kF32, task.d_out.Row(token, head), spec.v_head_dim)) {
    const auto v =
        ReadRow(task.kv.dtype, task.kv.ValueRow(slot, head / spec.group()), spec.v_head_dim);
    const auto out = ReadRow(DType::kF32, task.out.Row(token, head), spec.v_head_dim);
    const Score score =
        ScoreOf(spec, head, std::abs(task.q_positions[token] - task.kv_positions[slot]), q, k);
    p = std::exp(score.value - task.lse[static_cast<std::size_t>(token * spec.heads + head)]);
    d_score = p * (Dot(d_out, v) - Dot(d_out, out)) * score.slope * spec.scale;
  }

  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> d_out;
  double p;
  double d_score;
};

}  // namespace

std::vector<double> QueryGradient(const AttentionSpec& spec, const BackwardTask& task,
                                  std::int64_t token, int head) {
  std::vector<double> dq(static_cast<std::size_t>(spec.head_dim));
  const SlotRange visible = Visible(spec, task.q_positions[token], task.kv_positions);
  for (std::int64_t slot = visible.begin; slot < visible.end; ++slot) {
    const Pair pair(spec, task, token, head, slot);
    for (std::size_t d = 0; d < dq.size(); ++d) dq[d] += pair.d_score * pair.k[d];
  }
  return dq;
}

KeyGradient KeyGradientOf(const AttentionSpec& spec, const BackwardTask& task, std::int64_t slot,
                          int kv_head) {
  KeyGradient g{std::vector<double>(static_cast<std::size_t>(spec.head_dim)),
                std::vector<double>(static_cast<std::size_t>(spec.v_head_dim))};
  for (std::int64_t token = 0; token < task.q.tokens; ++token) {
    const SlotRange visible = Visible(spec, task.q_positions[token], task.kv_positions);
    if (slot < visible.begin || slot >= visible.end) continue;
    for (int head = kv_head * spec.group(); head < (kv_head + 1) * spec.group(); ++head) {
      const Pair pair(spec, task, token, head, slot);
      for (std::size_t d = 0; d < g.dk.size(); ++d) g.dk[d] += pair.d_score * pair.q[d];
      for (std::size_t d = 0; d < g.dv.size(); ++d) g.dv[d] += pair.p * pair.d_out[d];
    }
  }
  return g;
}

double MaxError(std::span<const float> actual, std::span<const double> expected) {
  if (actual.size() != expected.size()) return kInfinity;
  double largest = 1.0;
  double difference = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    if (a == e || (std::isnan(a) && std::isnan(e))) continue;  // equal infinities too
    if (!std::isfinite(a) || !std::isfinite(e)) return kInfinity;
    difference = std::max(difference, std::fabs(a - e));
  }
  for (double e : expected) {
    if (std::isfinite(e)) largest = std::max(largest, std::fabs(e));
  }
  return difference / largest;
}

double BoundGrowth(double score_magnitude) { return std::max(1.0, score_magnitude / 16.0); }

}  // namespace treeline::reference
