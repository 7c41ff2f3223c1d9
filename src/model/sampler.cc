#include "model/sampler.h"

#include <llama.h>

#include <cmath>

#include "core/check.h"

namespace treeline::model {
namespace {

void RequireRange(double value, double least, double most, const char* name) {
  Require(value >= least && value <= most, name, " is ", value, "; it must be from ", least, " to ",
          most);
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int vocabulary)
    : chain_(llama_sampler_chain_init(llama_sampler_chain_default_params()), llama_sampler_free) {
  constexpr int kLast = 64;  // tokens that a penalty sees
  RequireRange(options.temperature, 0.0, 1000.0, "temp");
  RequireRange(options.top_k, 0, 1 << 30, "top-k");
  RequireRange(options.top_p, 0.0, 1.0, "top-p");
  RequireRange(options.min_p, 0.0, 1.0, "min-p");
  RequireRange(options.repeat_penalty, 0.01, 100.0, "repeat-penalty");
  const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(chain_.get(), sampler); };
  if (options.repeat_penalty != 1.0) {
    add(llama_sampler_init_penalties(vocabulary, kLast, static_cast<float>(options.repeat_penalty),
                                     0.0f, 0.0f));
  }
  if (options.temperature == 0.0) {
    add(llama_sampler_init_greedy());
    return;
  }
  if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
  if (options.top_p < 1.0) add(llama_sampler_init_top_p(static_cast<float>(options.top_p), 1));
  if (options.min_p > 0.0) add(llama_sampler_init_min_p(static_cast<float>(options.min_p), 1));
  add(llama_sampler_init_temp(static_cast<float>(options.temperature)));
  add(llama_sampler_init_dist(options.seed));
}

Sampler::~Sampler() = default;
Sampler::Sampler(Sampler&&) noexcept = default;
Sampler& Sampler::operator=(Sampler&&) noexcept = default;

Token Sampler::Sample(std::span<const float> logits) {
  candidates_.resize(logits.size());
  float nan_or_zero = 0.0f;  // x - x is 0 for finite x, and a NaN never leaves a sum
  for (std::size_t i = 0; i < logits.size(); ++i) {
    candidates_[i] = {static_cast<llama_token>(i), logits[i], 0.0f};
    nan_or_zero += logits[i] - logits[i];
  }
  if (std::isnan(nan_or_zero)) {
    Throw<Error>(
        "the model's logits are not finite: its weights are not, or its keys and values are "
        "beyond the largest number of their type; --kv-type f32 and bf16 have the largest");
  }
  llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
  llama_sampler_apply(chain_.get(), &array);
  const Token token = array.data[array.selected].id;
  llama_sampler_accept(chain_.get(), token);
  return token;
}

void Sampler::Accept(Token token) { llama_sampler_accept(chain_.get(), token); }

}  // namespace treeline::model
