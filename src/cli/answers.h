#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/prompts.h"
#include "cli/text_stream.h"
#include "model/generator.h"
#include "model/vocabulary.h"

namespace treeline::cli {

// What rank 0 hears of its requests, and what it prints of them: the text of a single one as it
// comes, or a JSON line for each of many as they end.
class Answers {
 public:
  struct Options {
    std::vector<nlohmann::ordered_json> ids;  // of requests, in their lines; none: there is one
    bool print = true;
    int logprobs = 0;  // of so many of the likeliest tokens, for each that is chosen
  };
  // Borrows vocabulary and requests.
  Answers(const model::Vocabulary& vocabulary, std::span<const model::Request> requests,
          Options options);

  // They refer to this object, whose clock starts now.
  model::GenerationEvents Listen();

  std::int64_t prompt_tokens() const;
  std::int64_t tokens() const;
  double first_token_seconds() const { return first_token_; }
  // Of a single request; "logprobs" has {"token", "text", "logprob", "top": [the same]} of each
  // token.
  nlohmann::ordered_json ToJson() const { return Describe(0); }

 private:
  struct Answer {
    std::int64_t tokens = 0;
    std::string text;
    nlohmann::ordered_json logprobs = nlohmann::ordered_json::array();
  };

  bool many() const { return !options_.ids.empty(); }
  nlohmann::ordered_json Describe(std::size_t request) const;
  void ShowProgress(std::int64_t tokens, std::int64_t of);
  void Add(std::size_t request, model::Token token, std::span<const float> logits);
  void End(std::size_t request);
  void NoteTime();
  nlohmann::ordered_json Logprobs(model::Token token, std::span<const float> logits) const;

  const model::Vocabulary& vocabulary_;
  const std::span<const model::Request> requests_;
  const Options options_;
  std::vector<Answer> answers_;
  TextStream stream_;
  std::optional<Progress> progress_;
  std::chrono::steady_clock::time_point start_;
  double first_token_ = 0.0;  // of all requests; 0: none yet
};

}  // namespace treeline::cli
