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

// The same in memory of its own: dense, or in pages of `page_slots` slots if that is not 0. The
// first page comes last in memory; slots that are not in use are poisoned.
struct DealtKeys {
  std::vector<std::byte> bytes;
  std::vector<const void*> k_pages;  // empty when dense
  std::vector<const void*> v_pages;
  KvView view;
};
DealtKeys DealKeys(const KvView& whole, const Positions& slots, std::int64_t page_slots = 0);

// Slots [begin, count) of a shard that a layout of MakeLayout gives.
Positions Tail(const Positions& shard, std::int64_t begin);

// Likewise rows of queries or outputs; token t of `whole` is at position first + t.
struct DealtRows {
  std::vector<std::byte> bytes;
  TensorView view;
};
DealtRows DealRows(const TensorView& whole, const Positions& positions, std::int64_t first = 0);

}  // namespace treeline::cli
