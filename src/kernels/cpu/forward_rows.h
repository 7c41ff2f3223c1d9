#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>

#include "treeline/attention.h"

namespace treeline::cpu {

// Widest and narrowest visible range of some rows.
struct Reach {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();  // lowest begin
  std::int64_t last = 0;                                          // highest end
  std::int64_t common_begin = 0;                                  // highest begin
  std::int64_t common_end = std::numeric_limits<std::int64_t>::max();

  void Add(const SlotRange& range) {
    if (range.size() > 0) {
      first = std::min(first, range.begin);
      last = std::max(last, range.end);
    }
    common_begin = std::max(common_begin, range.begin);
    common_end = std::min(common_end, range.end);
  }
  // What either reaches; what is common is left alone.
  void Widen(const Reach& other) {
    first = std::min(first, other.first);
    last = std::max(last, other.last);
  }
};

// What a forward kernel knows of its query rows, beside their elements.
struct ForwardRows {
  template <class Arena>
  ForwardRows(Arena& arena, std::size_t rows)
      : token(arena.template Take<std::int64_t>(rows)),
        head(arena.template Take<std::int32_t>(rows)),
        position(arena.template Take<std::int64_t>(rows)),
        visible(arena.template Take<SlotRange>(rows)),
        slope(arena.template Take<float>(rows)) {}

  // Rows [row_begin, row_begin + rows) of a key head. Rows from there to `padded` repeat the last,
  // so that they never make a tile partial.
  void Load(const AttentionSpec& spec, const AttendTask& task, int kv_head, std::int64_t row_begin,
            int rows, int padded) const {
    const int group = spec.group();
    for (int i = 0; i < padded; ++i) {
      const std::int64_t r = row_begin + std::min(i, rows - 1);
      token[i] = r / group;
      head[i] = kv_head * group + static_cast<std::int32_t>(r % group);
      position[i] = task.q_positions[token[i]];
      visible[i] = Visible(spec, position[i], task.kv_positions);
      slope[i] = spec.alibi_slopes.empty() ? 0.0f
                                           : spec.alibi_slopes[static_cast<std::size_t>(head[i])] *
                                                 std::numbers::log2e_v<float>;
    }
  }

  Reach ReachOf(int first, int count) const {
    Reach reach;
    for (int i = first; i < first + count; ++i) reach.Add(visible[i]);
    return reach;
  }

  // Of row i among the rows of a result.
  std::size_t Target(const AttentionSpec& spec, int i) const {
    return static_cast<std::size_t>(token[i] * spec.heads + head[i]);
  }

  std::int64_t* token;
  std::int32_t* head;  // of the queries
  std::int64_t* position;
  SlotRange* visible;
  float* slope;  // ALiBi, log2 domain
};

// What turns the sums of a row into its result.
struct RowEnd {
  // Of a row whose weights, relative to 2^maximum, add up to `sum`. A sum of 0 means no key, or
  // none of any weight. A NaN is neither.
  RowEnd(float maximum, float sum)
      : factor(sum == 0.0f ? 0.0f : 1.0f / sum),
        lse(sum == 0.0f ? -std::numeric_limits<float>::infinity()
                        : (maximum + std::log2(sum)) * std::numbers::ln2_v<float>) {}

  float factor;  // of the weighted sum of values
  float lse;
};

}  // namespace treeline::cpu
