#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/links.h"
#include "cli/measure_overlap.h"
#include "cli/problem.h"
#include "treeline/cost.h"

namespace treeline::cli {

// What is timed over ranks.
enum class RankWork : std::uint8_t {
  kDecode,   // one query token a sequence, over keys on all ranks
  kMerge,    // the reduction of its partials alone
  kMpiSum,   // MPI_Allreduce of as many floats, to compare with; over processes only
  kPrefill,  // causal self-attention
  kTrain,    // the same, and its gradients
};
std::string_view Name(RankWork work);

struct RankCase {
  bool baseline = false;  // one device: what ranks are compared with
  RankWork work = RankWork::kDecode;
  Schedule schedule = Schedule::kTree;
  LayoutKind layout = LayoutKind::kStriped;
  int ranks = 1;
  int threads = 1;  // of a rank
  std::int64_t context = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  DType dtype = DType::kF32;
  int batch = 1;
  int node_size = 0;
  bool reproducible = false;
};

struct RankMeasurement {
  std::vector<double> seconds;
  std::vector<double> fractions;  // of the limit, measured next to each time; empty: none
  std::vector<double> costs;      // reproducible: time over that of normal steps, taken by turns
  double work = 0.0;              // bytes or floating-point operations of all ranks
  std::int64_t bytes = 0;         // a step, of the rank that sends most
  std::int64_t messages = 0;
  std::int64_t rounds = 0;
  std::size_t peak_bytes = 0;  // of the rank with most
  double balance = 0.0;        // most query-key pairs of a rank over the mean
  std::optional<Overlap> overlap = {};
  double max_error = 0.0;
  double bound = 0.0;
  Schedule schedule = Schedule::kTree;   // what auto chose, or the case's own
  std::vector<PredictedCost> predicted;  // decoding: by the measured cost model
};

struct RankTiming {
  int repeats = 7;
  std::chrono::milliseconds timeout{60'000};
  std::uint64_t seed = 1;
  std::optional<Links> links = {};  // unless given, they are measured
  bool overlap = false;             // whether to measure it, of prefill and train
};

// Runs a case `repeats` times and checks some of its results against the oracle.
RankMeasurement MeasureRanks(const RankCase& c, const RankTiming& timing);

}  // namespace treeline::cli
