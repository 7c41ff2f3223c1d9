#pragma once

#include <functional>

#include "treeline/comm.h"

namespace treeline::cli {

// How much of what messages take is hidden behind what is computed meanwhile.
struct Overlap {
  double serial = 0.0;   // seconds of a step that computes nothing while messages are on their way
  double network = 0.0;  // of that, seconds of messages
  // What overlapping saves of the shorter of the two, network and computation: 1 is all of it.
  double hidden = 0.0;
};

// Runs step() with and without overlap by turns. Medians, as rank 0 sees them. Collective.
Overlap MeasureOverlap(Communicator& comm, int repeats,
                       const std::function<void(Communicator&)>& step);

}  // namespace treeline::cli
