#pragma once

#include "schedule/packed_partial.h"
#include "treeline/schedule.h"

namespace treeline {

// value := merge of all ranks' values, bitwise the same on all ranks. `heads` rows make a token.
void Reduce(Communicator& comm, Backend& backend, int heads, const PackedPartial& value,
            const DecodeOptions& options);

}  // namespace treeline
