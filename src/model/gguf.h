#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "model/mapped_file.h"

namespace treeline::model {

// Types of values, as GGUF numbers them.
enum class GgufType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

struct GgufArray {
  GgufType element;
  std::uint64_t count;
  std::span<const std::byte> bytes;  // as they lie in the file
};

// Text from a file, in a form that fits into one line of an error, and does no harm to a terminal.
std::string Shown(std::string_view text);

// Text and arrays are views of the file.
using GgufValue =
    std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view, GgufArray>;

struct GgufTensor {
  std::string_view name;
  int type;                           // a ggml_type that ggml knows
  std::array<std::int64_t, 4> shape;  // the innermost first; 1 beyond the last
  std::span<const std::byte> data;
  std::uint64_t info_offset;  // of its entry in the file, for errors

  const char* TypeName() const;  // as ggml names it
  std::int64_t Elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  std::string Describe() const;  // "'blk.0.attn_q.weight' (Q4_K, 4096 x 4096)"
};

// The contents of a GGUF file, version 2 or 3. Everything in it has been checked: counts and
// offsets lie in the file, tensors are whole rows of known types and do not overlap, text is UTF-8,
// and no name comes twice.
class Gguf {
 public:
  // `name` is that of the file, for errors. Throws FormatError that names offset and value.
  Gguf(std::span<const std::byte> bytes, std::string name);

  const std::string& name() const { return name_; }
  const std::map<std::string_view, GgufValue>& values() const { return values_; }
  std::span<const GgufTensor> tensors() const { return tensors_; }

  // Null if there is none.
  const GgufTensor* FindTensor(std::string_view tensor) const;
  const GgufValue* FindValue(std::string_view key) const;

  // Values that must be of a kind, in a range. Without `otherwise` they must be there. Throw
  // FormatError.
  std::int64_t Integer(std::string_view key, std::int64_t least, std::int64_t most) const;
  std::int64_t Integer(std::string_view key, std::int64_t least, std::int64_t most,
                       std::int64_t otherwise) const;
  double Number(std::string_view key, double least, double most) const;
  double Number(std::string_view key, double least, double most, double otherwise) const;
  std::string_view Text(std::string_view key) const;
  std::string_view Text(std::string_view key, std::string_view otherwise) const;
  // An array of texts.
  std::vector<std::string_view> Texts(std::string_view key) const;

 private:
  const GgufValue& Value(std::string_view key) const;

  std::string name_;
  std::map<std::string_view, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string_view, std::size_t> places_;  // of tensors
};

}  // namespace treeline::model
