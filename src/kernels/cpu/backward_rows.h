#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "treeline/attention.h"

namespace treeline::cpu {

// What a backward kernel knows of a block of query rows, beside their elements, and which keys of a
// block of keys they see.
struct BackwardRows {
  template <class Arena>
  BackwardRows(Arena& arena, std::size_t most)
      : lse(arena.template Take<float>(most)),
        delta(arena.template Take<float>(most)),
        slope(arena.template Take<float>(most)),
        offset(arena.template Take<float>(most)),
        begin(arena.template Take<std::int32_t>(most)),
        end(arena.template Take<std::int32_t>(most)),
        most_(static_cast<int>(most)) {}

  // Finds the keys [key_begin, key_begin + keys) that rows [first, first + count) see, of those
  // that share a key head. `first_position` is that of the first key. False if there are none.
  bool Find(const AttentionSpec& spec, const BackwardTask& task, std::int64_t first, int count,
            std::int64_t key_begin, int keys, std::int64_t first_position) {
    const int group = spec.group();
    first_row = most_;
    last_row = 0;
    first_key = keys;
    last_key = 0;
    common_begin = 0;
    common_end = keys;
    for (int i = 0; i < count; ++i) {
      const std::int64_t position = task.q_positions[(first + i) / group];
      const SlotRange range = Visible(spec, position, task.kv_positions);
      const auto key = [&](std::int64_t slot) {
        return static_cast<std::int32_t>(std::clamp<std::int64_t>(slot - key_begin, 0, keys));
      };
      begin[i] = key(range.begin);
      end[i] = key(range.end);
      offset[i] = static_cast<float>(position - first_position);
      if (begin[i] < end[i]) {
        first_row = std::min(first_row, i);
        last_row = i + 1;
        first_key = std::min<int>(first_key, begin[i]);
        last_key = std::max<int>(last_key, end[i]);
      }
      common_begin = std::max<int>(common_begin, begin[i]);
      common_end = std::min<int>(common_end, end[i]);
    }
    for (int i = count; i < most_; ++i) {
      begin[i] = end[i] = 0;
      offset[i] = 0.0f;
    }
    return first_row < last_row;
  }

  // A row that has weight 0 everywhere.
  void Clear(int i) const {
    lse[i] = std::numeric_limits<float>::max();
    delta[i] = 0.0f;
    slope[i] = 0.0f;
  }

  // Row i is query row `row` of the task, whose product of d_out and out is given. Returns 0, or
  // NaN if that product or the row's lse is not finite.
  float Set(const AttentionSpec& spec, const BackwardTask& task, int kv_head, std::int64_t row,
            int i, float d_out_out) const {
    const std::int64_t token = row / spec.group();
    const std::int64_t head = std::int64_t{kv_head} * spec.group() + row % spec.group();
    const float natural = task.lse[static_cast<std::size_t>(token * spec.heads + head)];
    const bool empty = natural == -std::numeric_limits<float>::infinity();
    Clear(i);
    // One NaN is as good as another, and kernels want one without a payload.
    const auto plain = [](float x) {
      return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x;
    };
    if (!empty) lse[i] = plain(natural * std::numbers::log2e_v<float>);
    delta[i] = plain(d_out_out);
    if (!spec.alibi_slopes.empty()) {
      slope[i] = spec.alibi_slopes[static_cast<std::size_t>(head)] * std::numbers::log2e_v<float>;
    }
    return (d_out_out - d_out_out) + (empty ? 0.0f : natural - natural);
  }

  // Whether all rows, of `count` that were found, see keys [from, to).
  bool AllSee(int from, int to) const { return common_begin <= from && common_end >= to; }

  float* lse;           // log2 domain
  float* delta;         // d_out . out
  float* slope;         // ALiBi, log2 domain
  float* offset;        // position relative to the first key's
  std::int32_t* begin;  // visible keys of the block
  std::int32_t* end;
  int first_row = 0;  // rows that see a key are within [first_row, last_row)
  int last_row = 0;
  int first_key = 0;  // keys that any row sees are within [first_key, last_key)
  int last_key = 0;
  int common_begin = 0;  // keys that all rows see
  int common_end = 0;

 private:
  int most_;
};

}  // namespace treeline::cpu
