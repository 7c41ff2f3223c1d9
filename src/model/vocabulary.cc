#include "model/vocabulary.h"

#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <unordered_set>

#include "core/check.h"
#include "model/utf8.h"

namespace treeline::model {
namespace {

// What libllama says while it loads, for errors; nothing of it is printed.
class Log {
 public:
  Log() { llama_log_set(Write, this); }
  ~Log() {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  // The first error, in one line: what follows it says only that nothing was loaded.
  std::string error() const {
    std::string line = error_.empty() ? "no reason was given" : error_;
    std::replace(line.begin(), line.end(), '\n', ' ');
    while (!line.empty() && line.back() == ' ') line.pop_back();
    return line;
  }

 private:
  static void Write(ggml_log_level level, const char* text, void* log) {
    std::string& error = static_cast<Log*>(log)->error_;
    if (level == GGML_LOG_LEVEL_ERROR && error.empty()) error = text;
  }

  std::string error_;
};

// What libllama takes for granted of a file, and ends the program for if it is not so.
void RequireVocabulary(const Gguf& gguf) {
  const std::string_view kind = gguf.Text("tokenizer.ggml.model");
  if (kind != "llama" && kind != "gpt2") {
    Throw<FormatError>("'", gguf.name(), "' has a vocabulary of kind '", Shown(kind),
                       "'; 'llama' and 'gpt2' are supported");
  }
  const std::vector<std::string_view> tokens = gguf.Texts("tokenizer.ggml.tokens");
  std::unordered_set<std::string_view> seen;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool good = tokens[i].find('\0') == std::string_view::npos;
    if (!good || !seen.insert(tokens[i]).second) {
      Throw<FormatError>("'", gguf.name(), "': token ", i, ", '", Shown(tokens[i]),
                         good ? "', comes twice" : "', has a zero byte");
    }
  }
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (kind == "llama" && count < 3) {  // those that stand for unknown text, its start and its end
    Throw<FormatError>("'", gguf.name(), "' has ", count,
                       " tokens; of kind 'llama' are at least 3");
  }
  for (const char* key : {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"}) {
    gguf.Integer(key, 0, count - 1, 0);
  }
}

// The last resort: libllama ends programs for files that it does not expect.
[[noreturn]] void ReportAbort(const char* message) {
  std::fprintf(stderr, "treeline: error: the model's file cannot be used: %s\n", message);
  std::_Exit(4);
}

std::unique_ptr<llama_model, void (*)(llama_model*)> Load(const LlamaModel& of) {
  RequireVocabulary(of.gguf());
  ggml_set_abort_callback(ReportAbort);
  const std::string& path = of.path();
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  Log log;
  std::unique_ptr<llama_model, void (*)(llama_model*)> model(
      llama_model_load_from_file(path.c_str(), params), llama_model_free);
  if (model == nullptr) {
    Throw<FormatError>("'", path, "': libllama cannot read its vocabulary: ", log.error());
  }
  return model;
}

}  // namespace

Vocabulary::Vocabulary(const LlamaModel& model)
    : path_(model.path()), model_(Load(model)), vocab_(llama_model_get_vocab(model_.get())) {
  if (size() != model.shape().vocabulary) {
    Throw<FormatError>("'", path_, "' has a vocabulary of ", size(), " tokens and embeddings of ",
                       model.shape().vocabulary);
  }
}

Vocabulary::~Vocabulary() = default;

int Vocabulary::size() const { return llama_vocab_n_tokens(vocab_); }

std::vector<Token> Vocabulary::Tokenize(std::string_view text, bool start, bool special) const {
  const std::size_t good = Utf8Prefix(text);
  Require(good == text.size(), "the text is not UTF-8 at byte ", good);
  Require(text.size() <= std::numeric_limits<std::int32_t>::max() / 2, "the text has ", text.size(),
          " bytes; at most ", std::numeric_limits<std::int32_t>::max() / 2, " are allowed");
  const auto bytes = static_cast<std::int32_t>(text.size());
  std::vector<Token> tokens(text.size() + 2);
  int count = llama_tokenize(vocab_, text.data(), bytes, tokens.data(),
                             static_cast<std::int32_t>(tokens.size()), start, special);
  if (count < 0) {
    tokens.resize(static_cast<std::size_t>(-count));
    count = llama_tokenize(vocab_, text.data(), bytes, tokens.data(), -count, start, special);
  }
  tokens.resize(static_cast<std::size_t>(std::max(count, 0)));
  return tokens;
}

std::string Vocabulary::Text(Token token, bool special) const {
  Require(token >= 0 && token < size(), "token ", token, " is none of this model; there are ",
          size());
  std::array<char, 64> small{};
  const int length = llama_token_to_piece(vocab_, token, small.data(), small.size(), 0, special);
  if (length >= 0) return {small.data(), static_cast<std::size_t>(length)};
  std::string text(static_cast<std::size_t>(-length), '\0');
  llama_token_to_piece(vocab_, token, text.data(), -length, 0, special);
  return text;
}

std::string Vocabulary::Piece(Token token) const { return Text(token, false); }
std::string Vocabulary::Name(Token token) const { return Text(token, true); }
bool Vocabulary::IsEnd(Token token) const { return llama_vocab_is_eog(vocab_, token); }

std::string Vocabulary::Format(const std::vector<ChatMessage>& messages) const {
  const char* format = llama_model_chat_template(model_.get(), nullptr);
  if (format == nullptr) {
    Throw<FormatError>("'", path_, "' has no template for chats; it may not be made for them");
  }
  for (const ChatMessage& message : messages) {
    Require(message.content.find('\0') == std::string::npos,
            "a message of a chat has a zero byte, which templates cannot hold");
  }
  std::vector<llama_chat_message> chat;
  std::size_t bytes = 256;
  for (const ChatMessage& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    bytes += 2 * (message.role.size() + message.content.size());
  }
  std::string text(bytes, '\0');
  const auto apply = [&] {
    return llama_chat_apply_template(format, chat.data(), chat.size(), true, text.data(),
                                     static_cast<std::int32_t>(text.size()));
  };
  int length = apply();
  if (length > static_cast<int>(text.size())) {
    text.resize(static_cast<std::size_t>(length));
    length = apply();
  }
  if (length < 0) {
    Throw<FormatError>("'", path_, "' has a template for chats that libllama does not know");
  }
  text.resize(static_cast<std::size_t>(length));
  return text;
}

}  // namespace treeline::model
