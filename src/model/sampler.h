#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/llama_rank.h"

struct llama_sampler;
struct llama_token_data;

namespace treeline::model {

struct SamplerOptions {
  double temperature = 0.0;  // 0: the most likely token
  int top_k = 40;            // 0: all
  double top_p = 0.95;
  double min_p = 0.05;
  double repeat_penalty = 1.0;  // of tokens among the last 64
  std::uint32_t seed = 1;
};

// Chooses tokens by their logits: libllama's samplers.
class Sampler {
 public:
  // Throws ArgumentError that names the first option out of range.
  Sampler(const SamplerOptions& options, int vocabulary);
  ~Sampler();
  Sampler(Sampler&&) noexcept;
  Sampler& operator=(Sampler&&) noexcept;

  // Of [vocabulary] logits. The chosen token counts as one of the last. Throws Error if a logit is
  // not finite.
  Token Sample(std::span<const float> logits);

  // A token that was not sampled, of a prompt say, counts as one of the last.
  void Accept(Token token);

 private:
  std::unique_ptr<llama_sampler, void (*)(llama_sampler*)> chain_;
  std::vector<llama_token_data> candidates_;  // kept, since memory of that size comes page by page
};

}  // namespace treeline::model
