#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "treeline/schedule.h"

namespace treeline {

// What a message costs: latency + bytes / bytes_per_second.
struct LinkCost {
  double latency = 2e-6;  // seconds
  double bytes_per_second = 8e9;
};

// What a step of decoding costs; the defaults are those of threads on one machine.
struct CostModel {
  LinkCost within;                        // a node
  LinkCost between;                       // nodes
  double attend_bytes_per_second = 10e9;  // of keys and values, on one rank
  double merge_bytes_per_second = 5e9;    // of partials, on one rank
};

// Measures the links between neighbouring ranks, and the backend, in some milliseconds. Nodes are
// as in DecodeOptions. Collective; the result is rank 0's, on all ranks.
CostModel MeasureCost(Communicator& comm, Backend& backend, int node_size);

// A schedule's traffic and predicted time for one step of decoding.
struct PredictedCost {
  Schedule schedule;
  std::int64_t bytes;  // sent by the rank that sends most
  std::int64_t rounds;
  double attend;   // seconds over keys
  double merge;    // seconds over partials
  double network;  // seconds of messages on the critical path

  double seconds() const { return attend + merge + network; }
};

// Every decode schedule, the cheapest first.
std::vector<PredictedCost> PredictDecode(const Communicator& comm, const AttentionSpec& spec,
                                         std::span<const ShardedTask> tasks, int node_size,
                                         const CostModel& model);

// The cheapest schedule. Rank 0 chooses and tells the others: ranks that chose for themselves could
// differ, and would wait for each other for ever. Collective.
Schedule ChooseDecode(Communicator& comm, const AttentionSpec& spec,
                      std::span<const ShardedTask> tasks, int node_size, const CostModel& model);

}  // namespace treeline
