#pragma once

#include <cstddef>
#include <vector>

#include "treeline/layout.h"
#include "treeline/view.h"

namespace treeline::cli {

Layout MakeLayout(LayoutKind kind, std::int64_t tokens, int ranks);

// Throws ArgumentError that lists the names.
LayoutKind ParseLayout(std::string_view name);

// Whether positions are 0, 1, 2, …
bool IsWholeSequence(const Positions& positions);

// Keys and values of one rank, copied together as a rank would hold them.
struct DealtKeys {
  std::vector<std::byte> k;
  std::vector<std::byte> v;
  KvView view;
};
// `slots` are those of `whole` that the rank gets.
DealtKeys DealKeys(const KvView& whole, const Positions& slots);

// Likewise rows of queries or outputs.
struct DealtRows {
  std::vector<std::byte> bytes;
  TensorView view;
};
DealtRows DealRows(const TensorView& whole, const Positions& slots);

}  // namespace treeline::cli
