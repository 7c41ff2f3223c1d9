#include "cli/verify_ranks.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <tuple>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/machine.h"
#include "cli/rank_check.h"
#include "cli/ranks.h"
#include "cli/report.h"
#include "core/check.h"

namespace treeline::cli {
namespace {

constexpr LayoutKind kLayouts[] = {LayoutKind::kContiguous, LayoutKind::kStriped,
                                   LayoutKind::kZigzag};

// What a row of the table is about.
struct Subject {
  const char* work;
  Schedule schedule;
  LayoutKind layout;

  auto operator<=>(const Subject& other) const {
    return std::tuple(std::string_view(work), schedule, layout) <=>
           std::tuple(std::string_view(other.work), other.schedule, other.layout);
  }
};

// The run whose error is the largest part of its bound.
struct Worst {
  double error = 0.0;
  double bound = 0.0;
  bool within = true;  // every error is within its bound
  bool same_bits = true;
  std::uint64_t runs = 0;
  std::uint64_t index = 0;
  int ranks = 0;

  bool ok() const { return within && same_bits; }
};

// The options and types of a random case, with whole sequences: a few new tokens over all keys, or
// as many queries as keys.
ProblemShape MakeShape(std::uint64_t seed, std::uint64_t index, bool decode) {
  ProblemShape shape = MakeRandomCase(seed, index).shape;
  std::mt19937_64 random(seed + index);
  for (ProblemShape::Sequence& sequence : shape.sequences) {
    // Within what the oracle does in some milliseconds.
    const std::int64_t most = decode ? 700 : 150;
    const std::int64_t keys = std::min(sequence.kv_positions.count(), most);
    const std::int64_t tokens = decode ? static_cast<std::int64_t>(1 + random() % 3) : keys;
    sequence.kv_positions = Positions::Contiguous(0, keys);
    sequence.q_positions = Positions::Contiguous(std::max<std::int64_t>(keys - tokens, 0), tokens);
  }
  return shape;
}

bool HasGradients(const ProblemShape& shape) {
  return shape.kv_dtype != DType::kQ8_0 &&
         std::max(shape.spec.head_dim, shape.spec.v_head_dim) <= AttentionSpec::kMaxBackwardHeadDim;
}

class Verifier {
 public:
  explicit Verifier(const VerifyRanksOptions& options) : options_(options) {}

  void Run(std::uint64_t index) {
    RankProblem decode(MakeShape(options_.seed, index, true));
    const ProblemShape prefill_shape = MakeShape(options_.seed, index, false);
    RankProblem prefill(prefill_shape);
    for (const int ranks : options_.ranks) {
      for (const LayoutKind layout : kLayouts) {
        const RankSetup setup{.layout = layout,
                              .ranks = {ranks, options_.timeout, options_.threads}};
        const auto add = [&](const char* work, Schedule schedule, const RankReport& report) {
          Add({work, schedule, layout}, report, index, ranks);
        };
        for (const Schedule schedule : kDecodeSchedules) {
          const int node_size = 1 + static_cast<int>(index % 4);
          add("decode", schedule,
              decode.Decode(setup, {.schedule = schedule, .node_size = node_size}));
        }
        for (const Schedule schedule : {Schedule::kRingKv, Schedule::kRingQ}) {
          add("prefill", schedule, prefill.Prefill(setup, schedule));
        }
        if (HasGradients(prefill_shape)) {
          add("backward", Schedule::kRingKv, prefill.Backward(setup));
        }
      }
    }
  }

  const std::map<Subject, Worst>& worst() const { return worst_; }

 private:
  void Add(const Subject& subject, const RankReport& report, std::uint64_t index, int ranks) {
    Worst& w = worst_[subject];
    if (w.runs++ > 0 && !w.ok()) return;  // the first failure is the one to look at
    w.within = report.max_error <= report.bound;
    w.same_bits = report.same_bits;
    if (w.ok() && w.runs > 1 && report.max_error * w.bound <= w.error * report.bound) return;
    w.error = report.max_error;
    w.bound = report.bound;
    w.index = index;
    w.ranks = ranks;
  }

  const VerifyRanksOptions& options_;
  std::map<Subject, Worst> worst_;
};

}  // namespace

void VerifyRanks(const VerifyRanksOptions& options) {
  Verifier verifier(options);
  {
    Progress progress("verify", options.cases);
    for (std::uint64_t i = 0; i < options.cases; ++i) {
      verifier.Run(i);
      progress.Set(i + 1);
    }
  }
  const bool print = options.json != "-" && IsFirst();
  if (print) {
    std::printf("%-9s %-10s %-11s %7s  %-11s %-9s\n", "case", "schedule", "layout", "runs",
                "max error", "bound");
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::uint64_t runs = 0;
  const std::pair<const Subject, Worst>* failed = nullptr;
  for (const auto& entry : verifier.worst()) {
    const auto& [subject, w] = entry;
    runs += w.runs;
    if (print) {
      std::printf(
          "%-9s %-10s %-11s %7llu  %-11.2e %-9.0e %s\n", subject.work,
          std::string(Name(subject.schedule)).c_str(), std::string(Name(subject.layout)).c_str(),
          static_cast<unsigned long long>(w.runs), w.error, w.bound, w.ok() ? "ok" : "FAILED");
    }
    rows.push_back({{"case", subject.work},
                    {"schedule", Name(subject.schedule)},
                    {"layout", Name(subject.layout)},
                    {"runs", w.runs},
                    {"max_error", w.error},
                    {"bound", w.bound},
                    {"same_bits", w.same_bits},
                    {"verified", w.ok()}});
    if (!w.ok() && failed == nullptr) failed = &entry;
  }
  WriteJson(options.json, {{"machine", ToJson(DescribeMachine(), DefaultIsa())},
                           {"seed", options.seed},
                           {"cases", options.cases},
                           {"ranks", options.ranks},
                           {"rows", rows}});
  if (failed != nullptr) {
    const auto& [subject, w] = *failed;
    Throw<CheckFailure>(
        subject.work, " by ", Name(subject.schedule), " over ", w.ranks, " ranks, ",
        Name(subject.layout), ", ",
        w.same_bits ? "is beyond its bound" : "gives ranks different bits", " in case ", w.index,
        " of seed ", options.seed, ": ",
        MakeShape(options.seed, w.index, subject.work == std::string_view("decode")).Describe());
  }
  if (print) {
    std::printf("%llu runs over ranks match the float64 oracle\n",
                static_cast<unsigned long long>(runs));
  }
}

}  // namespace treeline::cli
