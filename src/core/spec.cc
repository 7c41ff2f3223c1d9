#include "treeline/spec.h"

#include <cmath>
#include <string_view>

#include "core/check.h"

namespace treeline {
namespace {

void RequireDim(std::string_view field, int dim) {
  Require(dim >= 8 && dim <= AttentionSpec::kMaxHeadDim && dim % 8 == 0, field, " is ", dim,
          "; it must be a multiple of 8 from 8 to ", AttentionSpec::kMaxHeadDim);
}

void RequirePerHead(std::string_view field, const std::vector<float>& values, int heads) {
  if (values.empty()) return;
  Require(values.size() == static_cast<std::size_t>(heads), field, " has ", values.size(),
          " values; it must be empty or have one per head (", heads, ")");
  for (std::size_t h = 0; h < values.size(); ++h) {
    Require(std::isfinite(values[h]), field, "[", h, "] is ", values[h], "; it must be finite");
  }
}

}  // namespace

AttentionSpec AttentionSpec::Make(int heads, int kv_heads, int head_dim) {
  AttentionSpec spec;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = head_dim;
  spec.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  return spec;
}

void Validate(const AttentionSpec& spec) {
  Require(spec.heads >= 1 && spec.heads <= AttentionSpec::kMaxHeads, "heads is ", spec.heads,
          "; it must be from 1 to ", AttentionSpec::kMaxHeads);
  Require(spec.kv_heads >= 1 && spec.kv_heads <= spec.heads && spec.heads % spec.kv_heads == 0,
          "kv_heads is ", spec.kv_heads, "; it must divide heads (", spec.heads, ")");
  RequireDim("head_dim", spec.head_dim);
  RequireDim("v_head_dim", spec.v_head_dim);
  Require(std::isfinite(spec.scale), "scale is ", spec.scale, "; it must be finite");
  Require(spec.window >= 0, "window is ", spec.window, "; it must be 0 (none) or positive");
  Require(std::isfinite(spec.softcap) && spec.softcap >= 0.0f, "softcap is ", spec.softcap,
          "; it must be 0 (none) or positive and finite");
  Require(spec.bf16_terms >= 0 && spec.bf16_terms <= AttentionSpec::kMaxBf16Terms, "bf16_terms is ",
          spec.bf16_terms, "; it must be from 0 to ", AttentionSpec::kMaxBf16Terms);
  RequirePerHead("alibi_slopes", spec.alibi_slopes, spec.heads);
  RequirePerHead("sinks", spec.sinks, spec.heads);
}

}  // namespace treeline
