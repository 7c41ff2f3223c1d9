#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "treeline/context.h"

namespace treeline::cli {

// Seconds that `body` takes.
double TimeOnce(const std::function<void()>& body);

double Median(std::vector<double> values);

// Bytes a second that all threads of the context read from `data`, four streams a thread.
double ReadBandwidth(const Context& context, const std::byte* data, std::size_t bytes);

// Floating-point operations a second of all threads, with nothing but fused multiply-adds in
// registers. Takes a few milliseconds.
double FmaPeak(const Context& context);

// The same of products in bf16, from the first-level cache. 0 if the instruction set has none.
double Bf16Peak(const Context& context);

}  // namespace treeline::cli
