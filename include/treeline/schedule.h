#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "treeline/attention.h"
#include "treeline/backend.h"
#include "treeline/comm.h"

namespace treeline {

// How ranks share the work; docs/algorithms.md gives the steps, bytes and rounds of each.
enum class Schedule : std::uint8_t {
  kTree,      // partials, all-reduced by recursive doubling
  kGather,    // partials, from every rank to every other at once
  kTree3,     // maximum, denominator and numerator, all-reduced one after the other
  kHeads,     // partials, reduced in shares of their rows, then gathered
  kTwoLevel,  // within each node first, then between nodes, then within again
  kRingKv,    // keys and values go round
  kRingQ,     // query rows go round with their partials
  kAuto,      // the cheapest of them by the default cost model; see treeline/cost.h for others
};

inline constexpr Schedule kDecodeSchedules[] = {
    Schedule::kTree,     Schedule::kGather, Schedule::kTree3, Schedule::kHeads,
    Schedule::kTwoLevel, Schedule::kRingKv, Schedule::kRingQ};

// "tree", "gather", "tree-3", "heads", "two-level", "ring-kv", "ring-q", "auto".
std::string_view Name(Schedule schedule);

// Inverse of Name. Throws ArgumentError that lists the names.
Schedule ParseSchedule(std::string_view name);

// A rank's part of one sequence, and what it must know of the other ranks' parts.
struct ShardedTask {
  AttendTask local;
  // [ranks] positions of every rank's keys; this rank's are those of `local`.
  std::span<const Positions> kv_shards;
  // [ranks] positions of every rank's query rows; only where queries are sharded and travel.
  std::span<const Positions> q_shards = {};
};

struct DecodeOptions {
  Schedule schedule = Schedule::kTree;
  // Nodes of kTwoLevel: [0, node_size), [node_size, 2 * node_size), …; 0: the ranks of each host.
  int node_size = 0;
  // The same bits for every number of ranks that divides 64 and any number of threads. Needs the
  // striped layout with a run of 1, and kTree or kGather.
  bool reproducible = false;
};

// Attention of query rows that all ranks have over keys that are spread over the ranks, with sinks.
// Every rank gets the whole result, bitwise the same. Collective: all ranks call it with the same
// spec, options and query rows. Throws ArgumentError for what this rank can see to be wrong, on
// this rank, and CommError on the others.
void Decode(Communicator& comm, Backend& backend, const AttentionSpec& spec,
            std::span<const ShardedTask> tasks, const DecodeOptions& options);

// Reduces a partial that every rank has of the same rows, without sinks: what Decode does after
// each rank has attended to its own keys. Rows are [token, head]. Not for kRingKv and kAuto.
void ReducePartial(Communicator& comm, Backend& backend, int heads, const Partial& partial,
                   const DecodeOptions& options);

// Attention of each rank's own query rows over the keys of all ranks, with sinks. kRingKv: the keys
// and values go round, the next block on its way while one is computed. kRingQ: the query rows do;
// for few rows over many keys. Collective.
void Prefill(Communicator& comm, Backend& backend, const AttentionSpec& spec,
             std::span<const ShardedTask> tasks, Schedule schedule = Schedule::kRingKv);

// A rank's part of one sequence's gradients.
struct ShardedBackwardTask {
  BackwardTask local;
  std::span<const Positions> kv_shards;  // [ranks]
};

// Gradients of Prefill: keys, values and their gradients go round. Adds to dq, dk and dv, each on
// the rank that holds the token, and to d_sinks, [heads] or empty, the same on all ranks.
// Collective.
void PrefillBackward(Communicator& comm, Backend& backend, const AttentionSpec& spec,
                     std::span<const ShardedBackwardTask> tasks, std::span<float> d_sinks = {});

}  // namespace treeline
