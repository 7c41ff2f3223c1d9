#include "treeline/energy.h"

#include <cstddef>

#include "core/check.h"

namespace treeline {
namespace {

double Dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Returns the number of keys.
std::size_t RequireShapes(const EnergyInput& input, std::span<const double> z) {
  const std::size_t dim = input.query.size();
  Require(dim > 0, "query has no elements; it must have at least one");
  Require(std::isfinite(input.scale), "scale is ", input.scale, "; it must be finite");
  Require(input.keys.size() % dim == 0, "keys has ", input.keys.size(),
          " elements; it must have a multiple of the query's ", dim);
  const std::size_t n = input.keys.size() / dim;
  // Divided, not multiplied: n * z.size() may not fit.
  const bool matches = n == 0 ? input.values.empty()
                              : input.values.size() % n == 0 && input.values.size() / n == z.size();
  Require(matches, "values has ", input.values.size(), " elements; it must have as many as z (",
          z.size(), ") for each of ", n, " keys");
  return n;
}

}  // namespace

EnergyResult Energy(const EnergyInput& input, std::span<const double> z) {
  const std::size_t n = RequireShapes(input, z);
  const std::size_t dim = input.query.size();
  const std::size_t v_dim = z.size();

  std::vector<double> terms(n);
  for (std::size_t j = 0; j < n; ++j) {
    terms[j] = input.scale * Dot(input.query, input.keys.subspan(j * dim, dim)) +
               Dot(z, input.values.subspan(j * v_dim, v_dim));
  }
  EnergyResult result{LogSumExp<double>(terms), std::vector<double>(v_dim, 0.0)};
  if (result.energy == -std::numeric_limits<double>::infinity()) return result;

  double total = 0.0;
  for (std::size_t j = 0; j < n; ++j) {
    const double weight = std::exp(terms[j] - result.energy);
    const std::span<const double> value = input.values.subspan(j * v_dim, v_dim);
    for (std::size_t d = 0; d < v_dim; ++d) result.gradient[d] += weight * value[d];
    total += weight;
  }
  // The total is 1 but for the rounding of the energy, a factor common to all weights.
  for (double& g : result.gradient) g /= total;
  return result;
}

}  // namespace treeline
