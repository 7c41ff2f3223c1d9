#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace treeline::test {

// Normally distributed, the same for a seed.
inline std::vector<float> RandomValues(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace treeline::test
