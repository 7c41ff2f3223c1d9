#pragma once

#include <span>

#include "treeline/context.h"
#include "treeline/layout.h"
#include "treeline/partial.h"
#include "treeline/spec.h"
#include "treeline/view.h"

namespace treeline {

// One sequence: queries over the keys of one shard. A packed batch is an array of these.
struct AttendTask {
  TensorView q;           // [tokens, heads, head_dim]; f32, bf16 or f16
  Positions q_positions;  // of the query tokens
  KvView kv;              // [slots, kv_heads, head_dim and v_head_dim]
  Positions kv_positions;
  Partial result;  // rows [token, head]; overwritten
};

// Attention of every task's queries over that task's keys, without sinks. Few rows over many keys
// are read at memory speed, many rows are tiled; the working memory is at most 2 MiB a thread.
// Results must not overlap any input or each other. Throws ArgumentError before anything is
// written.
void Attend(const AttentionSpec& spec, std::span<const AttendTask> tasks,
            const Context& context = {});

// Gradients of one sequence. `out` and `lse` are the final ones: over all shards, with sinks.
struct BackwardTask {
  TensorView q;
  Positions q_positions;
  KvView kv;  // f32, bf16 or f16
  Positions kv_positions;
  TensorView out;              // f32 [tokens, heads, v_head_dim]
  TensorView d_out;            // f32 [tokens, heads, v_head_dim]
  std::span<const float> lse;  // [tokens, heads]
  GradView dq;                 // [tokens, heads, head_dim]
  GradView dk;                 // [slots, kv_heads, head_dim]
  GradView dv;                 // [slots, kv_heads, v_head_dim]
};

// Adds each task's gradients to dq, dk and dv. The sums do not depend on the number of threads.
// Nothing of size tokens x slots is stored; the working memory is at most 2 MiB a thread.
// Head dims up to AttentionSpec::kMaxBackwardHeadDim. Gradients must not overlap anything else.
void AttendBackward(const AttentionSpec& spec, std::span<const BackwardTask> tasks,
                    const Context& context = {});

// d_sinks[h] -= sum over tokens of p_sink (d_out . out), with p_sink = exp(sinks[h] - lse).
// Over ranks: call it where the query rows live, then sum. Throws if the spec has no sinks.
void SinksBackward(const AttentionSpec& spec, const TensorView& out, const TensorView& d_out,
                   std::span<const float> lse, std::span<float> d_sinks);

}  // namespace treeline
