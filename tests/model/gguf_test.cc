// Files that are cut, corrupted or hostile are refused, with one line that says where and what.

#include "model/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "model/gguf_writer.h"
#include "model/llama_model.h"
#include "model/tiny_model.h"
#include "treeline/errors.h"

namespace treeline::model {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int kF32 = 0;
constexpr int kQ8 = 8;

// Builds files byte by byte, so that they can be wrong.
class Bytes {
 public:
  template <class T>
  Bytes& Add(T value) {
    const auto raw = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
    return *this;
  }
  Bytes& Text(std::string_view text) {
    Add(std::uint64_t{text.size()});
    const auto raw = std::as_bytes(std::span(text));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
    return *this;
  }
  Bytes& Head(std::uint64_t tensors, std::uint64_t values, std::uint32_t version = 3) {
    return Add('G').Add('G').Add('U').Add('F').Add(version).Add(tensors).Add(values);
  }
  Bytes& Tensor(std::string_view name, std::vector<std::uint64_t> shape, std::uint32_t type,
                std::uint64_t offset) {
    Text(name).Add(static_cast<std::uint32_t>(shape.size()));
    for (const std::uint64_t extent : shape) Add(extent);
    return Add(type).Add(offset);
  }
  Bytes& Data(std::size_t size) {
    bytes_.resize((bytes_.size() + 31) / 32 * 32 + size);
    return *this;
  }

  Gguf Parse() const { return Gguf(bytes_, "f"); }

 private:
  std::vector<std::byte> bytes_;
};

void ExpectError(const Bytes& bytes, const std::string& what) {
  EXPECT_THAT([&] { bytes.Parse(); }, ThrowsMessage<FormatError>(HasSubstr(what)));
}

constexpr auto kUint32 = std::uint32_t{4};
constexpr auto kString = std::uint32_t{8};
constexpr auto kArray = std::uint32_t{9};

TEST(GgufTest, ReadsWhatWasWritten) {
  GgufWriter writer;
  writer.Set("a.number", 7u);
  writer.Set("a.float", 0.5f);
  writer.Set("a.bool", true);
  writer.Set("a.text", std::string_view("häh"));
  const std::vector<std::string> texts{"x", "", "zz"};
  writer.Set("a.texts", std::span<const std::string>(texts));
  const std::vector<std::int64_t> shape{32, 3};
  writer.AddTensor("t", kQ8, shape, 3 * 34);
  std::vector<std::byte> file;
  writer.WriteHead([&](std::span<const std::byte> bytes) {
    file.insert(file.end(), bytes.begin(), bytes.end());
  });
  const std::size_t head = file.size();
  file.resize(head + 3 * 34);
  const Gguf gguf(file, "f");
  EXPECT_EQ(gguf.Integer("a.number", 0, 10), 7);
  EXPECT_EQ(gguf.Number("a.float", 0, 1), 0.5);
  EXPECT_EQ(gguf.Text("a.text"), "häh");
  EXPECT_EQ(std::get<bool>(*gguf.FindValue("a.bool")), true);
  EXPECT_EQ(std::get<GgufArray>(*gguf.FindValue("a.texts")).count, 3u);
  ASSERT_NE(gguf.FindTensor("t"), nullptr);
  EXPECT_EQ(gguf.FindTensor("t")->data.data(), file.data() + head);
  EXPECT_EQ(gguf.FindTensor("t")->data.size(), 3u * 34);
  EXPECT_EQ(gguf.FindTensor("t")->Describe(), "'t' (q8_0, 3 x 32)");
  EXPECT_EQ(gguf.FindTensor("u"), nullptr);
  EXPECT_THAT(
      [&] { gguf.Integer("a.number", 8, 10); },
      ThrowsMessage<FormatError>(HasSubstr("a.number is 7; it must be a whole number from 8")));
  EXPECT_THAT([&] { gguf.Integer("a.text", 0, 1); },
              ThrowsMessage<FormatError>(HasSubstr("of another type")));
  EXPECT_THAT([&] { gguf.Text("b"); },
              ThrowsMessage<FormatError>(HasSubstr("no value for the key 'b'")));
  EXPECT_EQ(gguf.Integer("b", 0, 1, 5), 5);
}

TEST(GgufTest, RefusesBadHeads) {
  ExpectError(Bytes(), "needs 4 bytes");
  ExpectError(Bytes().Add(0x21212121u), "starts with '!!!!'");
  ExpectError(Bytes().Head(0, 0, 1), "version of GGUF is 1");
  ExpectError(Bytes().Head(0, 0, 4), "version of GGUF is 4");
  ExpectError(Bytes().Head(0, 0, 0x03000000), "big-endian");
  ExpectError(Bytes().Head(std::uint64_t{1} << 63, 0),
              "the number of tensors is 9223372036854775808");
  ExpectError(Bytes().Head(0, ~std::uint64_t{0}), "the number of values is 18446744073709551615");
  EXPECT_NO_THROW(Bytes().Head(0, 0).Parse());
}

TEST(GgufTest, RefusesBadValues) {
  const auto value = [] { return Bytes().Head(0, 1); };
  ExpectError(value().Text("k").Add(kUint32), "a value needs 4 bytes");
  ExpectError(value().Text("k").Add(std::uint32_t{13}).Data(64), "the type of a value is 13");
  ExpectError(value().Text("k").Add(kString).Add(~std::uint64_t{0}).Data(64),
              "a value needs 18446744073709551615 bytes");
  ExpectError(value().Text("k\xFF").Add(kUint32).Data(64), "'k?' is not UTF-8");
  ExpectError(value().Text("k").Add(kString).Text("\xED\xA0\x80").Data(64), "is not UTF-8");
  ExpectError(value().Text("k").Add(kArray).Add(kArray).Data(64), "arrays of arrays");
  ExpectError(value().Text("k").Add(kArray).Add(kUint32).Add(std::uint64_t{1} << 62).Data(64),
              "the length of an array is 4611686018427387904");
  ExpectError(value().Text("k").Add(std::uint32_t{7}).Add(std::uint8_t{2}).Data(64), "a bool is 2");
  ExpectError(Bytes().Head(0, 2).Text("k").Add(kUint32).Add(1u).Text("k").Add(kUint32).Add(2u),
              "the key 'k' comes twice");
  ExpectError(value().Text("general.alignment").Add(kUint32).Add(24u).Data(64), "power of two");
  ExpectError(value().Text("general.alignment").Add(kUint32).Add(0u).Data(64),
              "general.alignment is 0");
}

TEST(GgufTest, RefusesBadTensors) {
  const auto one = [](std::vector<std::uint64_t> shape, std::uint32_t type, std::uint64_t offset) {
    return Bytes().Head(1, 0).Tensor("t", std::move(shape), type, offset).Data(256);
  };
  EXPECT_NO_THROW(one({64}, kF32, 0).Parse());
  EXPECT_NO_THROW(one({32}, kF32, 128).Parse());
  ExpectError(one({65}, kF32, 0), "has 260 bytes; there are 256");
  ExpectError(one({64}, kF32, 32), "is at 32 of the data and has 256 bytes");
  ExpectError(one({8}, kF32, ~std::uint64_t{31}), "is at 18446744073709551584");
  ExpectError(one({8}, kF32, 4), "it must be a multiple of 32");
  ExpectError(one({0}, kF32, 0), "a dimension of 0");
  ExpectError(one({std::uint64_t{1} << 63}, kF32, 0), "a dimension of 9223372036854775808");
  ExpectError(one({std::uint64_t{1} << 40, std::uint64_t{1} << 40}, kF32, 0), "must not overflow");
  ExpectError(one({}, kF32, 0), "has 0 dimensions");
  ExpectError(one({1, 1, 1, 1, 1}, kF32, 0), "has 5 dimensions");
  ExpectError(one({8}, 4, 0), "has type 4, which ggml does not know");  // one that was removed
  ExpectError(one({8}, 1000, 0), "has type 1000");
  ExpectError(one({33}, kQ8, 0), "q8_0 needs a multiple of 32");
  ExpectError(Bytes().Head(2, 0).Tensor("t", {8}, kF32, 0).Tensor("t", {8}, kF32, 32).Data(64),
              "tensor 't' comes twice");
  ExpectError(Bytes().Head(2, 0).Tensor("t", {16}, kF32, 0).Tensor("u", {8}, kF32, 32).Data(64),
              "tensor 'u' overlaps tensor 't'");
}

std::vector<std::byte> ReadAll(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> chars(std::istreambuf_iterator<char>(stream), {});
  const auto bytes = std::as_bytes(std::span(chars));
  return {bytes.begin(), bytes.end()};
}

// Whatever a file lost or got, it is read or refused, and nothing else happens.
TEST(GgufTest, SurvivesEveryTruncationAndRandomDamage) {
  const test::TinyModel model;
  const std::vector<std::byte> whole = ReadAll(model.path());
  const Gguf good(whole, "f");
  const auto head = static_cast<std::size_t>(good.tensors()[0].data.data() - whole.data());
  for (std::size_t size = 0; size < head; size += size < 4096 ? 1 : 97) {
    EXPECT_THROW(Gguf(std::span(whole).first(size), "f"), FormatError) << size;
  }
  EXPECT_THROW(Gguf(std::span(whole).first(whole.size() - 64), "f"), FormatError);
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<std::byte> damaged(whole.begin(),
                                   whole.begin() + static_cast<std::ptrdiff_t>(head));
    for (unsigned n = 0; n <= random() % 4; ++n) {
      damaged[random() % head] = static_cast<std::byte>(random());
    }
    damaged.resize(whole.size());
    try {
      const Gguf gguf(damaged, "f");
    } catch (const FormatError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 300);
}

class LlamaFileTest : public testing::Test {
 protected:
  // Replaces some bytes of the file by others of the same length.
  void Replace(std::string_view old, std::string_view with) {
    ASSERT_EQ(old.size(), with.size());
    std::vector<std::byte> bytes = ReadAll(file_.path());
    const auto pattern = std::as_bytes(std::span(old));
    const auto at = std::search(bytes.begin(), bytes.end(), pattern.begin(), pattern.end());
    ASSERT_NE(at, bytes.end());
    std::memcpy(&*at, with.data(), with.size());
    std::ofstream(file_.path(), std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  void ExpectError(const std::string& what) {
    EXPECT_THAT([&] { LlamaModel(file_.path()); }, ThrowsMessage<FormatError>(HasSubstr(what)));
  }

  test::TinyModel file_;
};

TEST_F(LlamaFileTest, DescribesAModel) {
  const LlamaModel model(file_.path());
  EXPECT_EQ(model.shape().layers, 2);
  EXPECT_EQ(model.shape().heads, 9);
  EXPECT_EQ(model.shape().kv_heads, 3);
  EXPECT_EQ(model.shape().vocabulary, 320);
  EXPECT_EQ(model.head().data, model.embedding().data);
}

TEST_F(LlamaFileTest, NamesAnArchitectureThatItDoesNotKnow) {
  Replace(std::string_view("\x05\0\0\0\0\0\0\0llama", 13),
          std::string_view("\x05\0\0\0\0\0\0\0gpt-j", 13));
  ExpectError("has the architecture 'gpt-j'; supported is 'llama'");
}

TEST_F(LlamaFileTest, NamesAKeyThatIsMissing) {
  Replace("llama.block_count", "llama.block_cOunt");
  ExpectError("no value for the key 'llama.block_count'");
}

TEST_F(LlamaFileTest, NamesATensorThatIsMissing) {
  Replace("blk.1.ffn_down.weight", "blk.1.ffn_down.weighT");
  ExpectError("has no tensor 'blk.1.ffn_down.weight'");
}

TEST_F(LlamaFileTest, NamesATensorThatHasAnotherShape) {
  using std::string_view_literals::operator""sv;
  Replace("llama.feed_forward_length\4\0\0\0\0\2\0\0"sv,   // 512
          "llama.feed_forward_length\4\0\0\0\0\4\0\0"sv);  // 1024
  ExpectError(
      "tensor 'blk.0.ffn_gate.weight' (q8_0, 512 x 256) should be "
      "'blk.0.ffn_gate.weight' (q8_0, 1024 x 256)");
}

TEST_F(LlamaFileTest, NamesAFileThatIsNotThere) {
  EXPECT_THAT([] { LlamaModel("/nowhere/model.gguf"); },
              ThrowsMessage<FormatError>(HasSubstr("cannot open '/nowhere/model.gguf'")));
  EXPECT_THAT([] { LlamaModel("/"); }, ThrowsMessage<FormatError>(HasSubstr("cannot read '/'")));
}

}  // namespace
}  // namespace treeline::model
