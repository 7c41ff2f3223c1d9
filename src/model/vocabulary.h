#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/llama_rank.h"

struct llama_model;
struct llama_vocab;

namespace treeline::model {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

// How a model's text becomes tokens, and back: libllama's, from the model's own file.
class Vocabulary {
 public:
  // Throws FormatError if the file has none that libllama can read, or one of another size.
  explicit Vocabulary(const LlamaModel& model);
  ~Vocabulary();
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  // The tokens of UTF-8 text. `start`: with what the model wants at the start of a sequence.
  // `special`: names of special tokens in the text become those tokens. Throws ArgumentError if the
  // text is not UTF-8, with the offset of what is not.
  std::vector<Token> Tokenize(std::string_view text, bool start, bool special) const;

  // The bytes of a token, which may be a part of a character; special tokens have none.
  std::string Piece(Token token) const;
  // As Piece, with the names of special tokens.
  std::string Name(Token token) const;

  bool IsEnd(Token token) const;

  // Messages as the model was trained to see them, up to where its answer starts. Throws
  // FormatError if the file has no template, or one that libllama does not know.
  std::string Format(const std::vector<ChatMessage>& messages) const;

  int size() const;

 private:
  std::string Text(Token token, bool special) const;

  const std::string path_;
  std::unique_ptr<llama_model, void (*)(llama_model*)> model_;
  const llama_vocab* vocab_ = nullptr;
};

}  // namespace treeline::model
