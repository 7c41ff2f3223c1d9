#pragma once

#include "schedule/packed_partial.h"
#include "treeline/schedule.h"

namespace treeline {

// value := merge of all ranks' values, bitwise the same on all ranks. `heads` rows make a token.
void Reduce(Communicator& comm, Backend& backend, int heads, const PackedPartial& value,
            const DecodeOptions& options);

// parts[0] := merge of all parts, in the pairs that the tree over so many ranks has: those half of
// them apart first. Overwrites other parts. Their number must be a power of two.
void MergeAsTree(Backend& backend, std::span<const Partial> parts);

}  // namespace treeline
