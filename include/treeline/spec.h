#pragma once

#include <cstdint>
#include <vector>

namespace treeline {

// What attention computes, independent of where its tokens live.
//
// The score of query position q and key position k in head h is
//   s = scale * (query . key);  with a softcap, s = softcap * tanh(s / softcap);
//   with ALiBi, s -= alibi_slopes[h] * |q - k|.
// Query head h reads key head h / (heads / kv_heads).
struct AttentionSpec {
  static constexpr int kMaxHeadDim = 576;
  static constexpr int kMaxBackwardHeadDim = 256;
  static constexpr int kMaxHeads = 1 << 16;
  static constexpr int kMaxBf16Terms = 2;

  int heads = 1;
  int kv_heads = 1;    // divides heads: 1 is MQA, heads is MHA
  int head_dim = 0;    // of queries and keys; a multiple of 8
  int v_head_dim = 0;  // of values and the output; a multiple of 8
  float scale = 1.0f;
  bool causal = false;              // k is visible to q only if k <= q
  std::int64_t window = 0;          // 0: none; otherwise k is visible to q only if |q - k| < window
  float softcap = 0.0f;             // 0: none
  std::vector<float> alibi_slopes;  // [heads], or empty
  // [heads], or empty. A sink is one more score per row, with no value. It belongs to the whole
  // sequence: Attend leaves it out, ApplySinks adds it once.
  std::vector<float> sinks;
  // If not 0, attention of many tokens may be computed in bf16 on CPUs that multiply in it,
  // whatever the inputs' types: queries and keys rounded to the sum of so many bf16 numbers (1 or
  // 2), values and weights to one. For inference: gradients want results of exact inputs.
  int bf16_terms = 0;
  // Queries that meet q8_0 keys in decoding may be rounded to 8 bits, 32 with a scale each, and
  // weights of q8_0 values to 14: faster on CPUs that multiply such numbers, less exact; see
  // docs/numerics.md.
  bool int8_queries = false;

  // The usual spec of a head shape: scale = 1 / sqrt(head_dim), v_head_dim = head_dim.
  static AttentionSpec Make(int heads, int kv_heads, int head_dim);

  // Query heads that share one key head.
  int group() const { return heads / kv_heads; }
};

// Throws ArgumentError that names the first field out of range and what is allowed.
void Validate(const AttentionSpec& spec);

}  // namespace treeline
