#pragma once

#include <cstdint>

#include "treeline/context.h"

// What a transformer does with each token's activations besides multiplying them.

namespace treeline::cpu {

// out[t] = x[t] / sqrt(mean of its squares + epsilon) * weight, for rows [tokens, n].
void RmsNorm(const Context& context, const float* x, const float* weight, std::int64_t tokens,
             int n, float epsilon, float* out);

// Rotates the first pairs of neighbours of every head of a token by that token's angles.
struct Rotation {
  const float* cosines;  // [tokens, pairs]
  const float* sines;    // [tokens, pairs]
  int pairs;
};
void Rotate(const Context& context, const Rotation& rotation, float* x, std::int64_t stride,
            std::int64_t tokens, int heads, int head_dim);

// gate = gate * logistic(gate) * up, for rows [tokens, n].
void SwiGlu(const Context& context, float* gate, const float* up, std::int64_t tokens, int n);

}  // namespace treeline::cpu
