#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>

#include "cli/machine.h"
#include "treeline/context.h"

namespace treeline::cli {

// What the machine can do at most, with the context's threads and instruction set.
struct Limits {
  double read_gbps = 0.0;    // four streams a thread, over 512 MiB
  double fma_gflops = 0.0;   // f32 multiply-adds in registers
  double bf16_gflops = 0.0;  // products in bf16; 0 if there are none
  Isa isa = Isa::kScalar;    // that does them
};
Limits MeasureLimits(
    const Context& context, const std::function<void()>& pause = [] {});

// The same on the first of several processes, while the others wait: they would disturb it.
// pause(), which waits for all of them, comes often enough for none to wait too long. The others
// get zeros.
Limits MeasureLimitsAlone(const Context& context, const std::function<void()>& pause);

// The `machine` and `limits` objects of every report.
nlohmann::ordered_json ToJson(const Machine& machine, Isa isa);
nlohmann::ordered_json ToJson(const Limits& limits);

}  // namespace treeline::cli
