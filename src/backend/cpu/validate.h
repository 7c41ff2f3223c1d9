#pragma once

#include <string_view>

#include "treeline/attention.h"

namespace treeline::cpu {

// Each throws ArgumentError that names what is wrong. `index` is the task's place in the batch.
void ValidateTask(const AttentionSpec& spec, const AttendTask& task, std::size_t index);
void ValidateTask(const AttentionSpec& spec, const BackwardTask& task, std::size_t index);

// A view of [tokens, spec.heads, spec.v_head_dim] in f32, as out and d_out are.
void ValidateOutput(std::string_view name, const AttentionSpec& spec, const TensorView& view,
                    std::int64_t tokens);

}  // namespace treeline::cpu
