#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cli/problem.h"
#include "treeline/reference.h"
#include "treeline/schedule.h"

namespace treeline::cli {

// What a run over ranks did.
struct RankReport {
  double max_error = 0.0;               // against the oracle, divided by the growth of the bound
  double bound = 0.0;                   // of max_error
  bool same_bits = true;                // a replicated result is bitwise the same on all ranks
  std::vector<float> bits;              // all results of all sequences
  std::vector<CommCounters> counters;   // [rank]
  std::vector<std::size_t> peak_bytes;  // [rank]; shard, in flight, workspace and result
  std::vector<std::int64_t> pairs;      // [rank]

  RankReport& AddBits(const std::vector<float>& values);

  std::int64_t MostBytes() const;
  std::int64_t MostMessages() const;
  std::int64_t Rounds() const;
  std::size_t PeakBytes() const;
};

// How to run.
struct RankSetup {
  LayoutKind layout = LayoutKind::kStriped;
  std::int64_t page_slots = 0;  // of the pages in which a rank's keys lie; 0: they are dense
  ThreadRanks ranks;
  bool in_process = false;  // ranks are threads, even where there are processes
  Isa isa = DefaultIsa();
  // What a schedule gets instead of each rank's communicator; for tests.
  std::function<std::unique_ptr<Communicator>(Communicator&)> decorate = {};
};

// A batch of sequences, whole, with the oracle's answer, which is computed once: on first use, for
// what is asked. Every run deals the tokens to ranks and compares what comes out.
class RankProblem {
 public:
  // Keys of every sequence are at positions 0, 1, 2, …
  explicit RankProblem(const ProblemShape& shape);
  ~RankProblem();
  RankProblem(const RankProblem&) = delete;
  RankProblem& operator=(const RankProblem&) = delete;

  const AttentionSpec& spec() const;

  // All ranks have all queries.
  RankReport Decode(const RankSetup& setup, const DecodeOptions& options);
  // A rank has the queries of the tokens whose keys it has. The queries are the last tokens of
  // their sequence, or all.
  RankReport Prefill(const RankSetup& setup, Schedule schedule);
  // Gradients, of queries that are dealt likewise. The error is that of the worst of dq, dk, dv and
  // the sinks'.
  RankReport Backward(const RankSetup& setup);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeline::cli
