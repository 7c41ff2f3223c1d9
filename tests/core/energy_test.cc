#include "treeline/energy.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <random>
#include <vector>

#include "treeline/attention.h"
#include "treeline/errors.h"
#include "treeline/reference.h"

namespace treeline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double Dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// max |a - b| / max(1, max |b|). NaN anywhere gives infinity.
double Difference(std::span<const double> a, std::span<const double> b) {
  if (a.size() != b.size()) return kInfinity;
  double difference = 0.0;
  double largest = 1.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) || std::isnan(b[i])) return kInfinity;
    difference = std::max(difference, std::fabs(a[i] - b[i]));
    largest = std::max(largest, std::fabs(b[i]));
  }
  return difference / largest;
}

std::vector<float> Narrow(std::span<const double> values) {
  return std::vector<float>(values.begin(), values.end());
}

// The narrowest Partial there is, and the largest v_dim that AnyProblem draws.
constexpr int kPartialDim = 8;

// A gradient as a row of a Partial, with zeros behind it.
std::vector<float> PartialRow(std::span<const double> gradient) {
  std::vector<float> row = Narrow(gradient);
  row.resize(kPartialDim, 0.0f);
  return row;
}

// An energy and its arguments. Random elements are N(0,1) and exact in f32.
struct Problem {
  std::size_t dim;
  std::size_t v_dim;
  std::vector<double> query;   // [dim]
  std::vector<double> keys;    // [n, dim]
  std::vector<double> values;  // [n, v_dim]
  std::vector<double> z;       // [v_dim]
  double scale;

  static Problem Random(std::size_t n, std::size_t dim, std::size_t v_dim, std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::size_t count) {
      std::vector<double> values(count);
      for (double& value : values) value = normal(generator);
      return values;
    };
    Problem p{dim, v_dim, draw(dim), draw(n * dim), draw(n * v_dim), draw(v_dim), 0.0};
    p.scale = 1.0f / std::sqrt(static_cast<float>(dim));
    return p;
  }

  std::size_t n() const { return keys.size() / dim; }
  std::span<const double> Key(std::size_t j) const { return std::span(keys).subspan(j * dim, dim); }
  std::span<const double> Value(std::size_t j) const {
    return std::span(values).subspan(j * v_dim, v_dim);
  }
  std::vector<double> Zero() const { return std::vector<double>(v_dim, 0.0); }

  // The keys [begin, end) alone.
  EnergyInput Shard(std::size_t begin, std::size_t end) const {
    return {.query = query,
            .keys = std::span(keys).subspan(begin * dim, (end - begin) * dim),
            .values = std::span(values).subspan(begin * v_dim, (end - begin) * v_dim),
            .scale = scale};
  }
  EnergyInput Input() const { return Shard(0, n()); }
};

// Draws a problem of up to 24 keys; shrinks to few keys and dims.
Problem AnyProblem(std::size_t min_keys) {
  const auto n = *rc::gen::inRange<std::size_t>(min_keys, 25);
  const auto dim = *rc::gen::inRange<std::size_t>(1, 9);
  const auto v_dim = *rc::gen::inRange<std::size_t>(1, kPartialDim + 1);
  return Problem::Random(n, dim, v_dim, *rc::gen::arbitrary<std::uint32_t>());
}

TEST(LogSumExp, OfOrdinaryTerms) {
  EXPECT_DOUBLE_EQ(LogSumExp<double>(std::vector{0.5}), 0.5);
  EXPECT_DOUBLE_EQ(LogSumExp<double>(std::vector{std::log(1.0), std::log(2.0), std::log(5.0)}),
                   std::log(8.0));
}

TEST(LogSumExp, OfNothingIsMinusInfinity) {
  EXPECT_EQ(LogSumExp<double>({}), -kInfinity);
  EXPECT_EQ(LogSumExp<double>(std::vector{-kInfinity, -kInfinity}), -kInfinity);
}

TEST(LogSumExp, MinusInfinityAddsNothing) {
  EXPECT_EQ(LogSumExp<double>(std::vector{-kInfinity, 3.0, -kInfinity}), 3.0);
}

TEST(LogSumExp, KeepsPlusInfinity) {
  EXPECT_EQ(LogSumExp<double>(std::vector{1.0, kInfinity, -kInfinity, kInfinity}), kInfinity);
}

TEST(LogSumExp, KeepsNanInAnyPlace) {
  for (double other : {1.0, kInfinity, -kInfinity}) {
    EXPECT_TRUE(std::isnan(LogSumExp<double>(std::vector{kNan, other}))) << other;
    EXPECT_TRUE(std::isnan(LogSumExp<double>(std::vector{other, kNan}))) << other;
  }
}

TEST(LogSumExp, DoesNotOverflow) {
  EXPECT_DOUBLE_EQ(LogSumExp<double>(std::vector{1e4, 1e4}), 1e4 + std::log(2.0));
  EXPECT_DOUBLE_EQ(LogSumExp<double>(std::vector{-1e4, -1e4}), -1e4 + std::log(2.0));
}

TEST(Energy, AtZeroIsTheAttentionOfOracleAndKernels) {
  std::uint32_t seed = 1;
  for (std::size_t n : {1, 7, 300}) {
    for (std::size_t dim : {8, 64}) {
      for (std::size_t v_dim : {16, 64}) {
        SCOPED_TRACE(testing::Message() << n << " keys, dims " << dim << " and " << v_dim);
        const Problem p = Problem::Random(n, dim, v_dim, seed++);
        const EnergyResult energy = Energy(p.Input(), p.Zero());

        AttentionSpec spec;
        spec.head_dim = static_cast<int>(dim);
        spec.v_head_dim = static_cast<int>(v_dim);
        spec.scale = static_cast<float>(p.scale);
        const std::vector<float> q = Narrow(p.query);
        const std::vector<float> k = Narrow(p.keys);
        const std::vector<float> v = Narrow(p.values);
        std::vector<float> out(v_dim);
        std::vector<float> lse(1);
        const auto slots = static_cast<std::int64_t>(n);
        const AttendTask task{
            .q = TensorView::Dense(q.data(), DType::kF32, 1, 1, spec.head_dim),
            .q_positions = Positions::Contiguous(slots - 1, 1),
            .kv = KvView::Strided(
                TensorView::Dense(k.data(), DType::kF32, slots, 1, spec.head_dim),
                TensorView::Dense(v.data(), DType::kF32, slots, 1, spec.v_head_dim)),
            .kv_positions = Positions::Contiguous(0, slots),
            .result = {.out = out, .lse = lse, .v_head_dim = spec.v_head_dim}};

        const reference::Result oracle = reference::Attend(spec, task);
        EXPECT_LT(Difference(energy.gradient, oracle.out), 1e-13);
        EXPECT_LT(Difference({&energy.energy, 1}, oracle.lse), 1e-13);
        for (Isa isa : AttainableIsas()) {
          Attend(spec, {&task, 1}, {.isa = isa});
          EXPECT_LT(reference::MaxError(out, energy.gradient), 1e-5) << Name(isa);
          EXPECT_LT(reference::MaxError(lse, {&energy.energy, 1}), 1e-5) << Name(isa);
        }
      }
    }
  }
}

RC_GTEST_PROP(Energy, GradientIsTheSlopeOfTheEnergy, ()) {
  const Problem p = AnyProblem(1);
  const EnergyResult result = Energy(p.Input(), p.z);
  // Central differences: the error is of order step^2, and rounding of the energy over step.
  constexpr double kStep = 1e-5;
  std::vector<double> slopes;
  for (std::size_t d = 0; d < p.v_dim; ++d) {
    std::vector<double> above = p.z;
    std::vector<double> below = p.z;
    above[d] += kStep;
    below[d] -= kStep;
    slopes.push_back((Energy(p.Input(), above).energy - Energy(p.Input(), below).energy) /
                     (above[d] - below[d]));
  }
  RC_ASSERT(Difference(result.gradient, slopes) < 1e-7);
}

// value + slope * epsilon, with epsilon^2 = 0.
struct Dual {
  double value;
  double slope;

  explicit Dual(double constant) : value(constant), slope(0.0) {}
  Dual(double v, double s) : value(v), slope(s) {}

  friend Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.slope + b.slope}; }
  friend Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.slope - b.slope}; }
  friend Dual operator*(double a, Dual b) { return {a * b.value, a * b.slope}; }
  friend bool operator<(Dual a, Dual b) { return a.value < b.value; }
  friend bool operator==(Dual a, Dual b) { return a.value == b.value; }
  // NOLINTBEGIN(readability-identifier-naming): LogSumExp looks these names up.
  friend Dual exp(Dual a) { return {std::exp(a.value), std::exp(a.value) * a.slope}; }
  friend Dual log(Dual a) { return {std::log(a.value), a.slope / a.value}; }
  // NOLINTEND(readability-identifier-naming)
};

RC_GTEST_PROP(Energy, GradientIsThatOfDualNumbers, ()) {
  const Problem p = AnyProblem(1);
  const EnergyResult result = Energy(p.Input(), p.z);
  std::vector<double> slopes;
  for (std::size_t d = 0; d < p.v_dim; ++d) {
    std::vector<Dual> terms;
    for (std::size_t j = 0; j < p.n(); ++j) {
      Dual term(p.scale * Dot(p.query, p.Key(j)));
      for (std::size_t e = 0; e < p.v_dim; ++e) {
        term = term + p.Value(j)[e] * Dual(p.z[e], e == d ? 1.0 : 0.0);
      }
      terms.push_back(term);
    }
    const Dual energy = LogSumExp<Dual>(terms);
    RC_ASSERT(Difference({&result.energy, 1}, {&energy.value, 1}) < 1e-13);
    slopes.push_back(energy.slope);
  }
  RC_ASSERT(Difference(result.gradient, slopes) < 1e-13);
}

TEST(LogSumExp, OfNoDualsHasNoSlope) {
  const Dual nothing = LogSumExp<Dual>(std::vector{Dual(-kInfinity, 3.0)});
  EXPECT_EQ(nothing.value, -kInfinity);
  EXPECT_EQ(nothing.slope, 0.0);
}

RC_GTEST_PROP(Energy, OfShardsMergesToTheEnergyOfAll, ()) {
  const Problem p = AnyProblem(0);
  // Any number of cuts at any place: shards may be empty.
  std::vector<std::size_t> cuts =
      *rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, p.n() + 1));
  cuts.insert(cuts.end(), {0, p.n()});
  std::sort(cuts.begin(), cuts.end());

  const EnergyResult all = Energy(p.Input(), p.z);
  std::vector<EnergyResult> shards;
  std::vector<double> energies;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    shards.push_back(Energy(p.Shard(cuts[i], cuts[i + 1]), p.z));
    energies.push_back(shards.back().energy);
  }

  const double merged = LogSumExp<double>(energies);
  std::vector<double> gradient = p.Zero();
  for (const EnergyResult& shard : shards) {
    if (shard.energy == -kInfinity) continue;
    for (std::size_t d = 0; d < p.v_dim; ++d) {
      gradient[d] += std::exp(shard.energy - merged) * shard.gradient[d];
    }
  }
  if (p.n() == 0) {
    RC_ASSERT(merged == -kInfinity);
  } else {
    RC_ASSERT(Difference({&merged, 1}, {&all.energy, 1}) < 1e-13);
  }
  RC_ASSERT(Difference(gradient, all.gradient) < 1e-13);

  // The same through Partials in f32.
  std::vector<std::vector<float>> outs(shards.size());
  std::vector<float> lses = Narrow(energies);
  std::vector<Partial> parts;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    outs[i] = PartialRow(shards[i].gradient);
    parts.push_back({.out = outs[i], .lse = {&lses[i], 1}, .v_head_dim = kPartialDim});
  }
  std::vector<float> out(kPartialDim);
  std::vector<float> lse(1);
  Merge(parts, {.out = out, .lse = lse, .v_head_dim = kPartialDim});
  out.resize(p.v_dim);
  RC_ASSERT(reference::MaxError(out, all.gradient) < 1e-5);
  RC_ASSERT(reference::MaxError(lse, {&all.energy, 1}) < 1e-5);
}

RC_GTEST_PROP(Energy, OfASinkIsOneMoreTerm, ()) {
  const Problem p = AnyProblem(0);
  const EnergyResult keys = Energy(p.Input(), p.Zero());
  const auto sink = static_cast<float>(*rc::gen::inRange(-4, 5));

  AttentionSpec spec;
  spec.head_dim = spec.v_head_dim = kPartialDim;
  spec.sinks = {sink};
  std::vector<float> out = PartialRow(keys.gradient);
  std::vector<float> lse = Narrow({&keys.energy, 1});
  ApplySinks(spec, {.out = out, .lse = lse, .v_head_dim = kPartialDim});
  out.resize(p.v_dim);

  // One more key, of score `sink` and value 0, in a dimension of its own.
  Problem extended = p;
  extended.dim = p.dim + 1;
  extended.query.push_back(1.0);
  extended.keys.clear();
  for (std::size_t j = 0; j < p.n(); ++j) {
    const auto key = p.Key(j);
    extended.keys.insert(extended.keys.end(), key.begin(), key.end());
    extended.keys.push_back(0.0);
  }
  extended.keys.insert(extended.keys.end(), p.dim, 0.0);
  extended.keys.push_back(sink / p.scale);
  extended.values.insert(extended.values.end(), p.v_dim, 0.0);
  const EnergyResult with_sink = Energy(extended.Input(), p.Zero());
  RC_ASSERT(reference::MaxError(out, with_sink.gradient) < 1e-5);
  RC_ASSERT(reference::MaxError(lse, {&with_sink.energy, 1}) < 1e-5);
}

TEST(Energy, OfNoKeysIsTheIdentity) {
  const Problem p = Problem::Random(0, 8, 3, 1);
  const EnergyResult result = Energy(p.Input(), p.z);
  EXPECT_EQ(result.energy, -kInfinity);
  EXPECT_EQ(result.gradient, (std::vector<double>{0.0, 0.0, 0.0}));
}

TEST(Energy, OfHugeScoresDoesNotOverflow) {
  // Scores 1e4, 1e4 and -1e4 in every order; then all of them low.
  const std::vector<double> query{100.0};
  std::vector<double> keys{-100.0, 100.0, 100.0};
  const std::vector<double> zero(1, 0.0);
  do {
    const std::vector<double>& values = keys;
    const EnergyResult result = Energy({.query = query, .keys = keys, .values = values}, zero);
    EXPECT_DOUBLE_EQ(result.energy, 1e4 + std::log(2.0));
    EXPECT_DOUBLE_EQ(result.gradient[0], 100.0);
  } while (std::next_permutation(keys.begin(), keys.end()));

  const std::vector<double> low{-100.0, -100.0};
  const std::vector<double> values{1.0, 3.0};
  const EnergyResult result = Energy({.query = query, .keys = low, .values = values}, zero);
  EXPECT_DOUBLE_EQ(result.energy, -1e4 + std::log(2.0));
  EXPECT_DOUBLE_EQ(result.gradient[0], 2.0);
}

TEST(Energy, KeepsNanAndInfinity) {
  const std::vector<double> query{1.0};
  const std::vector<double> values{1.0, 2.0};
  const std::vector<double> zero(1, 0.0);
  const auto energy_of = [&](std::vector<double> keys) {
    return Energy({.query = query, .keys = keys, .values = values}, zero);
  };
  for (double other : {1.0, -kInfinity, kInfinity}) {
    EXPECT_TRUE(std::isnan(energy_of({kNan, other}).energy)) << other;
    EXPECT_TRUE(std::isnan(energy_of({kNan, other}).gradient[0])) << other;
  }
  EXPECT_EQ(energy_of({kInfinity, 1.0}).energy, kInfinity);
  EXPECT_TRUE(std::isnan(energy_of({kInfinity, 1.0}).gradient[0]));
  EXPECT_EQ(energy_of({-kInfinity, 1.0}).energy, 1.0);
  EXPECT_EQ(energy_of({-kInfinity, 1.0}).gradient[0], 2.0);
  EXPECT_EQ(energy_of({-kInfinity, -kInfinity}).energy, -kInfinity);
  EXPECT_EQ(energy_of({-kInfinity, -kInfinity}).gradient[0], 0.0);
}

TEST(Energy, RejectsShapesThatDiffer) {
  const Problem p = Problem::Random(3, 4, 2, 1);
  const std::vector<double> long_z(3, 0.0);
  EXPECT_NO_THROW(Energy(p.Input(), p.z));
  EXPECT_THROW(Energy(p.Input(), long_z), ArgumentError);
  EXPECT_THROW(Energy(p.Input(), {}), ArgumentError);

  EnergyInput input = p.Input();
  input.query = {};
  EXPECT_THROW(Energy(input, p.z), ArgumentError);

  std::vector<double> part_of_a_key = p.keys;
  part_of_a_key.push_back(0.0);
  input = p.Input();
  input.keys = part_of_a_key;
  EXPECT_THROW(Energy(input, p.z), ArgumentError);

  input = p.Input();
  input.keys = {};
  EXPECT_THROW(Energy(input, p.z), ArgumentError);

  input = p.Input();
  input.values = input.values.first(5);
  EXPECT_THROW(Energy(input, p.z), ArgumentError);

  for (double scale : {kNan, kInfinity}) {
    input = p.Input();
    input.scale = scale;
    EXPECT_THROW(Energy(input, p.z), ArgumentError);
  }
}

// |q|^2 / 2 - F / scale.
double HopfieldEnergy(const Problem& p) {
  return Dot(p.query, p.query) / 2 - Energy(p.Input(), p.Zero()).energy / p.scale;
}

RC_GTEST_PROP(Energy, RetrievalLowersTheHopfieldEnergy, ()) {
  Problem p = AnyProblem(1);
  p.scale = *rc::gen::inRange(1, 80) / 10.0;
  p.v_dim = p.dim;
  p.values = p.keys;
  double before = HopfieldEnergy(p);
  for (int step = 0; step < 20; ++step) {
    const std::vector<double> next = Energy(p.Input(), p.Zero()).gradient;
    double moved = 0.0;  // |next - query|^2
    for (std::size_t d = 0; d < p.dim; ++d) {
      moved += (next[d] - p.query[d]) * (next[d] - p.query[d]);
    }
    p.query = next;
    const double after = HopfieldEnergy(p);
    // The fall that convexity of F guarantees.
    RC_ASSERT(after <= before - moved / 2 + 1e-13 * std::max(1.0, Dot(p.keys, p.keys)));
    before = after;
  }
}

RC_GTEST_PROP(Energy, IsTheEvidenceOfAMixtureAndItsWeightsThePosterior, ()) {
  const Problem p = AnyProblem(1);
  // Mixture of Gaussians at the keys, with variance 1 / scale and weights prior / sum(prior).
  std::vector<double> prior;
  for (std::size_t j = 0; j < p.n(); ++j) {
    prior.push_back(std::exp(p.scale * Dot(p.Key(j), p.Key(j)) / 2));
  }
  double prior_sum = 0.0;
  for (double weight : prior) prior_sum += weight;
  const double half_dim = static_cast<double>(p.dim) / 2;
  const double peak = std::pow(p.scale / (2 * std::numbers::pi), half_dim);  // of one Gaussian

  // With the identity as values, the gradient at 0 is the softmax weights.
  Problem weights = p;
  weights.v_dim = p.n();
  weights.values.assign(p.n() * p.n(), 0.0);
  for (std::size_t j = 0; j < p.n(); ++j) weights.values[j * p.n() + j] = 1.0;

  std::mt19937 generator(1);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < 5; ++trial) {
    for (double& q : weights.query) q = normal(generator);
    std::vector<double> joint;  // p(q, j)
    double evidence = 0.0;      // p(q)
    for (std::size_t j = 0; j < p.n(); ++j) {
      double distance = 0.0;  // |q - k_j|^2
      for (std::size_t d = 0; d < p.dim; ++d) {
        distance += (weights.query[d] - p.Key(j)[d]) * (weights.query[d] - p.Key(j)[d]);
      }
      joint.push_back(prior[j] / prior_sum * peak * std::exp(-p.scale * distance / 2));
      evidence += joint.back();
    }
    const EnergyResult result = Energy(weights.Input(), weights.Zero());
    const double hopfield = Dot(weights.query, weights.query) / 2 - result.energy / p.scale;
    const double constant = -std::log(evidence) - p.scale * hopfield;
    // The same for every query.
    const double expected = std::log(prior_sum) - std::log(peak);
    RC_ASSERT(Difference({&constant, 1}, {&expected, 1}) < 1e-12);

    std::vector<double> posterior = joint;  // p(j | q)
    for (double& weight : posterior) weight /= evidence;
    RC_ASSERT(Difference(result.gradient, posterior) < 1e-12);
  }
}

}  // namespace
}  // namespace treeline
