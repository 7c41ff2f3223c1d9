#pragma once

#include <cstdint>

#include "treeline/cost.h"

namespace treeline {

// The shape of one step of decoding, as far as traffic depends on it.
struct DecodeTraffic {
  int ranks = 1;
  int nodes = 1;
  int largest_node = 1;     // its ranks
  std::int64_t tokens = 1;  // query tokens of all sequences
  std::int64_t heads = 1;
  std::int64_t row_bytes = 0;  // of a partial's row: 4 * v_head_dim + 4
  std::int64_t kv_bytes = 0;   // of all ranks
};

// Predicted cost of a schedule: the one place that knows what schedules send. See
// docs/algorithms.md for the formulas.
PredictedCost Predict(Schedule schedule, const DecodeTraffic& shape, const CostModel& model);

}  // namespace treeline
