// Long sequences over ranks, against the float64 oracle: every pair of a schedule, layout, option,
// type, head shape, number of queries, length, batch, storage and number of ranks is in some case.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cli/rank_check.h"
#include "sanitized.h"

namespace treeline::cli {
namespace {

// What may vary. Those before kShapeFactors make the problem that the oracle solves, those behind
// them how it is run.
enum Factor : std::size_t {
  kOption,
  kQueryType,
  kKeyType,
  kHeads,
  kQueries,
  kLength,
  kBatch,
  kShapeFactors,
  kSchedule = kShapeFactors,
  kNodeSize,
  kLayout,
  kPageSlots,
  kRanks,
  kFactors
};

// A level of every factor.
using Case = std::array<std::size_t, kFactors>;

struct Level {
  std::size_t factor;
  std::size_t level;
  auto operator<=>(const Level&) const = default;
};
using Pairs = std::set<std::array<Level, 2>>;

// Calls fn for every pair of levels of a case within factors [0, factors).
template <class Fn>
void ForEachPair(const Case& c, std::size_t factors, const Fn& fn) {
  for (std::size_t g = 1; g < factors; ++g) {
    for (std::size_t f = 0; f < g; ++f) fn(std::array{Level{f, c[f]}, Level{g, c[g]}});
  }
}

Pairs AllPairs(const Case& levels, std::size_t factors) {
  Pairs pairs;
  ForEachPair(levels, factors, [&](const std::array<Level, 2>& counts) {
    for (std::size_t a = 0; a < counts[0].level; ++a) {
      for (std::size_t b = 0; b < counts[1].level; ++b) {
        pairs.insert({Level{counts[0].factor, a}, Level{counts[1].factor, b}});
      }
    }
  });
  return pairs;
}

void Remove(Pairs& pairs, const Case& c, std::size_t factors) {
  ForEachPair(c, factors, [&](const std::array<Level, 2>& pair) { pairs.erase(pair); });
}

// The oracle is slow: all rows of a long sequence only with few heads.
constexpr std::int64_t kMostCost = 40'000'000;

// Cases in which every pair of levels of factors [0, last) occurs. Each starts as one of `bases`,
// which fix factors [0, first) and cover their pairs. Greedy: of random cases with a pair that is
// missing, the one with the most such pairs is taken, and the cheapest of several. Cases that cost
// more than kMostCost are not.
std::vector<Case> Cover(const Case& levels, const std::vector<Case>& bases, std::size_t first,
                        std::size_t last, const std::function<std::int64_t(const Case&)>& cost) {
  constexpr int kTries = 100;
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return random() % n; };  // the same on every system
  Pairs missing = AllPairs(levels, last);
  for (const Case& base : bases) Remove(missing, base, first);
  std::vector<Case> cases;
  while (!missing.empty()) {
    const std::array<Level, 2> wanted = *missing.begin();
    Case best{};
    int most = 0;
    for (int i = 0; i < kTries || most == 0; ++i) {
      if (i > 100 * kTries) throw std::logic_error("a pair of levels is never allowed");
      Case c = bases[below(bases.size())];
      for (std::size_t f = first; f < last; ++f) c[f] = below(levels[f]);
      for (const Level& level : wanted) {
        if (level.factor >= first) c[level.factor] = level.level;
      }
      int covers = 0;
      ForEachPair(c, last, [&](const auto& pair) { covers += missing.contains(pair) ? 1 : 0; });
      const bool wants = c[wanted[0].factor] == wanted[0].level;  // a base may have another
      if (!wants || covers == 0 || cost(c) > kMostCost) continue;
      if (covers > most || (covers == most && cost(c) < cost(best))) {
        best = c;
        most = covers;
      }
    }
    Remove(missing, best, last);
    cases.push_back(best);
  }
  return cases;
}

struct HeadShape {
  int heads;
  int kv_heads;
  int head_dim;
  int v_head_dim;
};

constexpr std::int64_t kAll = 0;  // as many queries as keys

// The levels of every factor.
struct Space {
  std::vector<std::function<void(AttentionSpec&)>> options{
      [](AttentionSpec&) {},
      [](AttentionSpec& s) { s.causal = false; },
      [](AttentionSpec& s) { s.window = 300; },
      [](AttentionSpec& s) { s.softcap = 3.0f; },
      [](AttentionSpec& s) { s.alibi_slopes = PerHead(s, 0.5f); },
      [](AttentionSpec& s) { s.sinks = PerHead(s, 2.0f); },
      [](AttentionSpec& s) {
        s.window = 777;
        s.softcap = 5.0f;
        s.alibi_slopes = PerHead(s, 0.25f);
        s.sinks = PerHead(s, 1.0f);
      }};
  std::vector<DType> query_types{DType::kF32, DType::kBF16, DType::kF16};
  std::vector<DType> key_types{DType::kF32, DType::kBF16, DType::kF16, DType::kQ8_0};
  // MHA, GQA, a group of three, and MLA's one key head with values of another size.
  std::vector<HeadShape> heads{{2, 2, 16, 16}, {4, 2, 16, 16}, {9, 3, 16, 16}, {4, 1, 40, 32}};
  std::vector<std::int64_t> queries{1, 3, 17};
  std::vector<std::int64_t> lengths{kSanitized ? 100 : 1000, kSanitized ? 417 : 4097};
  std::vector<std::int64_t> company{0, 5};  // tokens of a second sequence, before the long one
  std::vector<Schedule> schedules{std::begin(kDecodeSchedules), std::end(kDecodeSchedules)};
  std::vector<int> node_sizes{2, 3};
  std::vector<LayoutKind> layouts{LayoutKind::kContiguous, LayoutKind::kStriped,
                                  LayoutKind::kZigzag};
  std::vector<std::int64_t> page_slots{0, 16};
  std::vector<int> ranks{1, 2, 3, 4, 5, 6, 7, 8, 9};

  Case Levels() const {
    return {options.size(),    query_types.size(), key_types.size(),  heads.size(),
            queries.size(),    lengths.size(),     company.size(),    schedules.size(),
            node_sizes.size(), layouts.size(),     page_slots.size(), ranks.size()};
  }

  // Different in every head.
  static std::vector<float> PerHead(const AttentionSpec& spec, float first) {
    std::vector<float> values;
    for (int h = 0; h < spec.heads; ++h) values.push_back(first / static_cast<float>(1 + h));
    return values;
  }

  ProblemShape ShapeOf(const Case& c) const {
    const HeadShape& h = heads[c[kHeads]];
    ProblemShape shape;
    shape.spec = AttentionSpec::Make(h.heads, h.kv_heads, h.head_dim);
    shape.spec.v_head_dim = h.v_head_dim;
    shape.spec.causal = true;
    options[c[kOption]](shape.spec);
    shape.q_dtype = query_types[c[kQueryType]];
    shape.kv_dtype = key_types[c[kKeyType]];
    for (const std::int64_t tokens : {company[c[kBatch]], lengths[c[kLength]]}) {
      if (tokens == 0) continue;
      const std::int64_t asked = queries[c[kQueries]];
      const std::int64_t rows = asked == kAll ? tokens : std::min(asked, tokens);
      shape.sequences.push_back(
          {Positions::Contiguous(tokens - rows, rows), Positions::Contiguous(0, tokens)});
    }
    shape.seed = 11;
    return shape;
  }

  RankSetup SetupOf(const Case& c) const {
    return {.layout = layouts[c[kLayout]],
            .page_slots = page_slots[c[kPageSlots]],
            .ranks = {.ranks = ranks[c[kRanks]]}};
  }

  // Query-key pairs of all heads, for the oracle.
  std::int64_t CostOf(const Case& c) const {
    const std::int64_t tokens = lengths[c[kLength]];
    const std::int64_t asked = queries[c[kQueries]];
    return (asked == kAll ? tokens : asked) * tokens * heads[c[kHeads]].heads;
  }
};

// Runs the cases of a covering set, all of one shape after the other.
// run(problem, setup, case) gives a report whose error must be within its bound.
template <class RunCase>
void RunCovering(const Space& space, const RunCase& run) {
  const Case levels = space.Levels();
  const auto cost = [&](const Case& c) { return space.CostOf(c); };
  const std::vector<Case> shapes = Cover(levels, {Case{}}, 0, kShapeFactors, cost);
  std::map<Case, std::vector<Case>> by_shape;
  for (const Case& shape : shapes) by_shape[shape];
  for (const Case& c : Cover(levels, shapes, kShapeFactors, kFactors, cost)) {
    Case shape{};
    std::copy_n(c.begin(), std::size_t{kShapeFactors}, shape.begin());
    by_shape[shape].push_back(c);
  }
  Pairs missing = AllPairs(levels, kFactors);
  for (auto& [shape, cases] : by_shape) {
    if (cases.empty()) cases.push_back(shape);  // for its own pairs
    RankProblem problem(space.ShapeOf(shape));
    for (const Case& c : cases) {
      SCOPED_TRACE(testing::Message()
                   << space.ShapeOf(c).Describe() << "; " << space.ranks[c[kRanks]] << " ranks, "
                   << Name(space.layouts[c[kLayout]]) << ", pages of "
                   << space.page_slots[c[kPageSlots]] << ", " << Name(space.schedules[c[kSchedule]])
                   << ", nodes of " << space.node_sizes[c[kNodeSize]]);
      const RankReport report = run(problem, space.SetupOf(c), c);
      EXPECT_LE(report.max_error, report.bound);
      EXPECT_TRUE(report.same_bits);
      Remove(missing, c, kFactors);
    }
  }
  EXPECT_TRUE(missing.empty()) << missing.size() << " pairs of levels are in no case";
}

void CheckDecode(Space space) {
  space.schedules.push_back(Schedule::kAuto);
  RunCovering(space, [&](RankProblem& problem, const RankSetup& setup, const Case& c) {
    return problem.Decode(setup, {.schedule = space.schedules[c[kSchedule]],
                                  .node_size = space.node_sizes[c[kNodeSize]]});
  });
}

void CheckPrefill(Space space) {
  space.schedules = {Schedule::kRingKv, Schedule::kRingQ};
  space.node_sizes = {1};
  RunCovering(space, [&](RankProblem& problem, const RankSetup& setup, const Case& c) {
    return problem.Prefill(setup, space.schedules[c[kSchedule]]);
  });
}

void CheckBackward(Space space) {
  space.schedules = {Schedule::kRingKv};
  space.node_sizes = {1};
  space.key_types = {DType::kF32, DType::kBF16, DType::kF16};
  RunCovering(space, [&](RankProblem& problem, const RankSetup& setup, const Case&) {
    return problem.Backward(setup);
  });
}

// Without tokens on some of the ranks, or with few on each.
Space OfManyRanks() {
  Space space;
  space.ranks = {kSanitized ? 16 : 64};
  space.lengths = {kSanitized ? 13 : 61, kSanitized ? 130 : 1000};
  return space;
}

Space WithQueries(Space space, std::vector<std::int64_t> queries) {
  space.queries = std::move(queries);
  return space;
}

TEST(CoveringTest, DecodeIsExact) { CheckDecode({}); }
TEST(CoveringTest, DecodeIsExactOverManyRanks) { CheckDecode(OfManyRanks()); }

TEST(CoveringTest, PrefillIsExact) { CheckPrefill(WithQueries({}, {1, 3, 17, kAll})); }
TEST(CoveringTest, PrefillIsExactOverManyRanks) {
  CheckPrefill(WithQueries(OfManyRanks(), {1, 3, 17, kAll}));
}

TEST(CoveringTest, GradientsAreExact) { CheckBackward(WithQueries({}, {1, 3, 17, kAll})); }
TEST(CoveringTest, GradientsAreExactOverManyRanks) {
  CheckBackward(WithQueries(OfManyRanks(), {1, 3, 17, kAll}));
}

}  // namespace
}  // namespace treeline::cli
