#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/llama_rank.h"
#include "model/sampler.h"

namespace treeline::model {

struct Request {
  std::vector<Token> prompt;  // at least one; the same on all ranks
  std::int64_t most_tokens = 128;
  SamplerOptions sampling = {};
};

// What happens to requests, as rank 0 sees it; nothing is called on other ranks.
struct GenerationEvents {
  // After each chunk of a prompt. False ends the request.
  std::function<bool(std::size_t request, std::int64_t tokens, std::int64_t of)> prefilled = {};
  // For each token that is generated, none of the end, with the logits [vocabulary] that it was
  // chosen by. False ends the request.
  std::function<bool(std::size_t request, Token token, std::span<const float> logits)> generated =
      {};
  std::function<void(std::size_t request)> ended = {};
  // Whether a token ends the text.
  std::function<bool(Token token)> is_end = {};
};

// What requests cost this rank.
struct GenerationCost {
  std::int64_t prompt_tokens = 0;  // that were computed, not kept or loaded
  double prompt_seconds = 0.0;
  // Of decoding: tokens are chosen, and what follows them is computed.
  std::int64_t tokens = 0;
  double seconds = 0.0;
  std::int64_t bytes = 0;  // sent
  std::int64_t rounds = 0;
};

// Answers requests, several at a time, over the ranks of a group. Rank 0 samples; its tokens go to
// the others. All ranks make the same calls.
class Generator {
 public:
  Generator(LlamaRank& rank, Communicator& comm) : rank_(rank), comm_(comm) {}

  // Up to `at_a_time` requests are in the cache at a time; one that ends makes room for the next.
  // Throws ArgumentError if a request cannot fit. Collective.
  void Run(std::span<const Request> requests, int at_a_time, const GenerationEvents& events);

  // Continues a sequence whose tokens are a beginning of the request's prompt, or are not: as many
  // as agree are kept. `tokens` are those of the sequence, before and afterwards. Returns how many
  // were kept. Collective.
  std::int64_t Continue(SequenceId id, std::vector<Token>& tokens, const Request& request,
                        const GenerationEvents& events);

  const GenerationCost& cost() const { return cost_; }

 private:
  struct Active {
    std::size_t request;
    SequenceId id;
    Sampler sampler;
    std::int64_t made = 0;
    bool stopped = false;       // in its prompt
    std::vector<float> logits;  // [vocabulary], of what comes next
  };

  Active Begin(std::size_t index, const Request& request, const GenerationEvents& events);
  // Computes a prompt from token `kept` on; returns how many of all its tokens are computed then.
  std::int64_t Prefill(Active& active, const Request& request, std::int64_t kept,
                       const GenerationEvents& events);
  // The next token of every request that goes on, or kStop; the same on all ranks.
  std::vector<Token> Choose(std::vector<Active>& active, std::span<const Request> requests,
                            const GenerationEvents& events);
  void Compute(std::vector<Active>& active, std::span<const Token> tokens);
  // Counts what `decode` costs.
  template <class Body>
  void CountDecoding(const Body& decode);

  static constexpr Token kStop = -1;

  LlamaRank& rank_;
  Communicator& comm_;
  GenerationCost cost_;
  std::vector<float> logits_;  // [active, vocabulary]
};

}  // namespace treeline::model
