#pragma once

#include <cstddef>
#include <limits>
#include <span>

#include "treeline/context.h"
#include "treeline/spec.h"

namespace treeline {

// lse of a row that saw no key.
inline constexpr float kNoKeys = -std::numeric_limits<float>::infinity();

// Attention of each row over one subset of the keys: the (energy, gradient) pair of docs/theory.md.
// A row with no keys has lse = -inf and out = 0: the identity of Merge.
struct Partial {
  std::span<float> out;  // [rows, v_head_dim], normalised
  std::span<float> lse;  // [rows], natural log
  int v_head_dim = 0;

  std::size_t rows() const { return lse.size(); }
};

// target := parts[0] (+) parts[1] (+) …, over disjoint key sets, in one pass.
// Bitwise commutative for two parts; associative up to rounding. NaN is kept, in a canonical form.
// `target` may be the same memory as one of the parts. No parts at all give the identity.
// Throws ArgumentError if shapes differ.
void Merge(std::span<const Partial> parts, const Partial& target, const Context& context = {});

// accumulator := accumulator (+) other. No aliasing.
void MergeInto(const Partial& accumulator, const Partial& other, const Context& context = {});

// Adds the spec's sinks to a finished partial whose rows are [token, head]. Call it once per
// sequence, after the last merge. Without sinks it does nothing.
void ApplySinks(const AttentionSpec& spec, const Partial& partial);

}  // namespace treeline
