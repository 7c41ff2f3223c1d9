// Vocabularies that libllama would end the program for are refused.

#include "model/vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "model/tiny_model.h"
#include "treeline/errors.h"

namespace treeline::model {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// A model's file, to be broken.
class BrokenModel : public testing::Test {
 protected:
  BrokenModel() {
    std::ifstream stream(file_.path(), std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(stream), {});
  }

  // Where the value of a key begins, after its type.
  std::size_t ValueOf(const std::string& key) const {
    const std::size_t found = bytes_.find(key);
    EXPECT_NE(found, std::string::npos) << key;
    return found + key.size() + sizeof(std::uint32_t);
  }
  void Load() {
    std::ofstream(file_.path(), std::ios::binary) << bytes_;
    const LlamaModel model(file_.path());
    const Vocabulary vocabulary(model);
    EXPECT_EQ(vocabulary.Tokenize("text", true, false).size(), 4u);
  }
  void ExpectRefused(const std::string& part) {
    EXPECT_THAT([&] { Load(); }, ThrowsMessage<FormatError>(HasSubstr(part)));
  }
  // The text of the first token, whose length comes before it.
  std::size_t FirstToken() const {
    return ValueOf("tokenizer.ggml.tokens") + sizeof(std::uint32_t) + 2 * sizeof(std::uint64_t);
  }

  static constexpr std::size_t kTokenBytes = 2;  // of the first tokens, which stand for 0, 1, …

  const test::TinyModel file_;
  std::string bytes_;
};

TEST_F(BrokenModel, IsWholeBefore) { Load(); }

TEST_F(BrokenModel, KindIsUnknown) {
  bytes_.replace(ValueOf("tokenizer.ggml.model") + sizeof(std::uint64_t), 4, "none");
  ExpectRefused("a vocabulary of kind 'none'; 'llama' and 'gpt2' are supported");
}

TEST_F(BrokenModel, TokenHasAZeroByte) {
  std::memset(&bytes_[FirstToken()], 0, kTokenBytes);
  ExpectRefused("', has a zero byte");
}

TEST_F(BrokenModel, TokenComesTwice) {
  // The length of the second comes before it.
  const std::size_t second = FirstToken() + kTokenBytes + sizeof(std::uint64_t);
  std::memcpy(&bytes_[second], &bytes_[FirstToken()], kTokenBytes);
  ExpectRefused("comes twice");
}

TEST_F(BrokenModel, TokensAreNoTexts) {
  bytes_[ValueOf("tokenizer.ggml.tokens")] = 4;  // whole numbers
  EXPECT_THROW(Load(), FormatError);
}

TEST_F(BrokenModel, EndIsNoToken) {
  const std::int32_t id = 1 << 30;
  std::memcpy(&bytes_[ValueOf("tokenizer.ggml.eos_token_id")], &id, sizeof(id));
  ExpectRefused("tokenizer.ggml.eos_token_id is 1073741824; it must be a whole number from 0 to ");
}

TEST_F(BrokenModel, MessagesWithZeroBytesAreRefused) {
  const LlamaModel model(file_.path());
  const Vocabulary vocabulary(model);
  const std::string content("a\0b", 3);
  EXPECT_ANY_THROW(vocabulary.Format({{"user", content}}));
}

}  // namespace
}  // namespace treeline::model
