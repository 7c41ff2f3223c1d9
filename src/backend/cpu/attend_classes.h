#pragma once

#include <span>

#include "treeline/attention.h"

namespace treeline::cpu {

// As Backend::AttendClasses.
void AttendClasses(const AttentionSpec& spec, const AttendTask& task, int classes,
                   std::span<float> parts, const Context& context);

}  // namespace treeline::cpu
