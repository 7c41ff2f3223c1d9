#pragma once

#include <cmath>
#include <limits>
#include <span>
#include <vector>

namespace treeline {

// The scalar function whose gradient is attention, in float64 and plain loops: for checks, not for
// speed. docs/theory.md derives it.

// log(sum of exp(term)), without overflow. No terms, or only -inf: -inf. Any NaN: that NaN.
// Otherwise any +inf: +inf.
// T is double or a forward-mode dual number: constructible from a double, with + and -, with < and
// == and != that compare values alone, and with exp and log that argument-dependent lookup finds.
template <class T>
T LogSumExp(std::span<const T> terms) {
  using std::exp;
  using std::log;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  T highest(-kInfinity);
  for (const T& term : terms) {
    if (term != term) return term;
    if (highest < term) highest = term;
  }
  // Subtracting an infinity from itself would give NaN.
  if (highest == T(-kInfinity) || highest == T(kInfinity)) return highest;
  T sum(0.0);
  for (const T& term : terms) sum = sum + exp(term - highest);
  return highest + log(sum);
}

// One query and the n keys and values that it reads. Borrowed: alive and unchanged during a call.
struct EnergyInput {
  std::span<const double> query;   // [dim]
  std::span<const double> keys;    // [n, dim]
  std::span<const double> values;  // [n, v_dim]
  double scale = 1.0;
};

struct EnergyResult {
  double energy = 0.0;
  std::vector<double> gradient;  // [v_dim], with respect to z
};

// F(z) = log sum_j exp(t_j) with t_j = scale * query.keys[j] + z.values[j], and its gradient
//   dF/dz = sum_j exp(t_j - F) values[j],
// both from one evaluation of the terms t_j. At z = 0 the energy is attention's `lse` and the
// gradient is its `out`.
// No keys, or only terms of -inf: energy -inf and gradient 0. A NaN term: both are NaN. Otherwise a
// term of +inf: energy +inf and gradient NaN.
// `z` has v_dim elements. Throws ArgumentError if shapes differ, the query has no elements or the
// scale is not finite.
EnergyResult Energy(const EnergyInput& input, std::span<const double> z);

}  // namespace treeline
