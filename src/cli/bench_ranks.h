#pragma once

#include "cli/command.h"

namespace treeline::cli {

// `treeline bench decode`, `prefill` and `train`: schedules over ranks.
void AddBenchDecode(CLI::App& bench);
void AddBenchPrefill(CLI::App& bench);
void AddBenchTrain(CLI::App& bench);

}  // namespace treeline::cli
