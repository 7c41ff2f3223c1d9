#pragma once

#include <atomic>
#include <functional>

#include "treeline/comm.h"

namespace treeline::model {

// Whether work that is under way is no longer needed.
using Stop = std::atomic<bool>;
using Work = std::function<void(const Stop& stop)>;

// Does each rank's work, which may take longer than the communicator waits and must not use it. If
// one throws a FormatError, all ranks undo theirs and throw the same. Collective.
void WorkTogether(Communicator& comm, const Work& work, const std::function<void()>& undo = {});

}  // namespace treeline::model
