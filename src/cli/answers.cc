#include "cli/answers.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "model/utf8.h"

namespace treeline::cli {
namespace {

using nlohmann::ordered_json;

std::string ToLine(const ordered_json& json) { return json.dump() + '\n'; }

}  // namespace

Answers::Answers(const model::Vocabulary& vocabulary, std::span<const model::Request> requests,
                 Options options)
    : vocabulary_(vocabulary),
      requests_(requests),
      options_(std::move(options)),
      answers_(requests.size()) {}

model::GenerationEvents Answers::Listen() {
  start_ = std::chrono::steady_clock::now();
  return {.prefilled =
              [this](std::size_t, std::int64_t tokens, std::int64_t of) {
                ShowProgress(tokens, of);
                return true;
              },
          .generated =
              [this](std::size_t request, model::Token token, std::span<const float> logits) {
                Add(request, token, logits);
                return true;
              },
          .ended = [this](std::size_t request) { End(request); },
          .is_end = [this](model::Token token) { return vocabulary_.IsEnd(token); }};
}

std::int64_t Answers::prompt_tokens() const {
  std::int64_t sum = 0;
  for (const model::Request& request : requests_) {
    sum += static_cast<std::int64_t>(request.prompt.size());
  }
  return sum;
}

std::int64_t Answers::tokens() const {
  std::int64_t sum = 0;
  for (const Answer& answer : answers_) sum += answer.tokens;
  return sum;
}

void Answers::ShowProgress(std::int64_t tokens, std::int64_t of) {
  if (many()) return;
  if (!progress_) progress_.emplace("prompt", static_cast<std::size_t>(of));
  progress_->Set(static_cast<std::size_t>(tokens));
  if (tokens == of) progress_.reset();
}

void Answers::NoteTime() {
  if (first_token_ > 0.0) return;
  first_token_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Answers::Add(std::size_t request, model::Token token, std::span<const float> logits) {
  NoteTime();
  Answer& answer = answers_[request];
  const std::string piece = vocabulary_.Piece(token);
  ++answer.tokens;
  answer.text += piece;
  if (options_.logprobs > 0) answer.logprobs.push_back(Logprobs(token, logits));
  if (options_.print && !many()) stream_.Write(piece);
}

void Answers::End(std::size_t request) {
  NoteTime();
  if (!options_.print) return;
  if (!many()) return stream_.End();
  ordered_json line{{"id", options_.ids[request]}};
  line.update(Describe(request));
  TextStream::WriteWhole(ToLine(line));
}

ordered_json Answers::Describe(std::size_t request) const {
  const Answer& answer = answers_[request];
  ordered_json json{{"text", model::ReplaceInvalidUtf8(answer.text)},
                    {"prompt_tokens", requests_[request].prompt.size()},
                    {"tokens", answer.tokens}};
  if (options_.logprobs > 0) json["logprobs"] = answer.logprobs;
  return json;
}

ordered_json Answers::Logprobs(model::Token token, std::span<const float> logits) const {
  const double highest = double{*std::ranges::max_element(logits)};
  double total = 0.0;
  for (const float logit : logits) total += std::exp(double{logit} - highest);
  const auto describe = [&](model::Token each) {
    return ordered_json{
        {"token", each},
        {"text", model::ReplaceInvalidUtf8(vocabulary_.Piece(each))},
        {"logprob", double{logits[static_cast<std::size_t>(each)]} - highest - std::log(total)}};
  };
  std::vector<model::Token> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto count = std::min(order.size(), static_cast<std::size_t>(options_.logprobs));
  std::ranges::partial_sort(
      order, order.begin() + static_cast<std::ptrdiff_t>(count), std::ranges::greater{},
      [&](model::Token each) { return std::pair(logits[static_cast<std::size_t>(each)], -each); });
  ordered_json noted = describe(token);
  noted["top"] = ordered_json::array();
  for (std::size_t i = 0; i < count; ++i) noted["top"].push_back(describe(order[i]));
  return noted;
}

}  // namespace treeline::cli
