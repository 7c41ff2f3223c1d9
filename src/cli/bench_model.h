#pragma once

#include "cli/command.h"

namespace treeline::cli {

// `treeline bench model`.
void AddBenchModel(CLI::App& bench);

}  // namespace treeline::cli
