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

// Bytes of `slots` slots of keys and values.
std::size_t KeyBytes(const KvView& whole, std::int64_t slots);

// Copies the keys, then the values, of some slots together as a rank would hold them: KeyBytes
// bytes. Returns a view of the copy.
KvView CopyKeys(const KvView& whole, const Positions& slots, std::byte* target);

// The same in memory of its own.
struct DealtKeys {
  std::vector<std::byte> bytes;
  KvView view;
};
DealtKeys DealKeys(const KvView& whole, const Positions& slots);

// Likewise rows of queries or outputs.
struct DealtRows {
  std::vector<std::byte> bytes;
  TensorView view;
};
DealtRows DealRows(const TensorView& whole, const Positions& slots);

}  // namespace treeline::cli
