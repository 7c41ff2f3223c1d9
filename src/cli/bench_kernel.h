#pragma once

#include "cli/command.h"

namespace treeline::cli {

// `treeline bench kernel`: decode, forward, backward and merge on one device.
void AddBenchKernel(CLI::App& bench);

}  // namespace treeline::cli
