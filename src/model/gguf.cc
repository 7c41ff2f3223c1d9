#include "model/gguf.h"

#include <ggml.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "core/check.h"
#include "model/utf8.h"

namespace treeline::model {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian");

constexpr std::uint64_t kMaxAlignment = 1 << 20;
constexpr std::size_t kShownText = 60;

// Bytes of a value, or of the fewest that one can have.
std::uint64_t SizeOf(GgufType type) {
  constexpr std::uint64_t kSizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};
  return kSizes[static_cast<std::size_t>(type)];
}

// Reads a file from its beginning to its end; nothing beyond.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  std::uint64_t offset() const { return offset_; }
  std::uint64_t left() const { return bytes_.size() - offset_; }

  template <class... Parts>
  [[noreturn]] void Fail(std::uint64_t offset, const Parts&... parts) const {
    Throw<FormatError>("'", name_, "', offset ", offset, ": ", parts...);
  }

  std::span<const std::byte> Take(std::uint64_t bytes, const char* what) {
    if (bytes > left()) {
      Fail(offset_, what, " needs ", bytes, " bytes; the file ends after ", left());
    }
    const auto taken = bytes_.subspan(offset_, bytes);
    offset_ += bytes;
    return taken;
  }

  template <class T>
  T Read(const char* what) {
    T value;
    std::memcpy(&value, Take(sizeof(T), what).data(), sizeof(T));
    return value;
  }

  std::string_view ReadText(const char* what) {
    const std::uint64_t start = offset_;
    const auto length = Read<std::uint64_t>(what);
    const auto taken = Take(length, what);
    const std::string_view text(reinterpret_cast<const char*>(taken.data()), taken.size());
    if (!IsUtf8(text)) Fail(start, what, " '", Shown(text), "' is not UTF-8");
    return text;
  }

  // How many things follow, of which each takes at least `least` bytes.
  std::uint64_t ReadCount(const char* what, std::uint64_t least) {
    const std::uint64_t start = offset_;
    const auto count = Read<std::uint64_t>(what);
    if (count > left() / least) {
      Fail(start, what, " is ", count, "; the ", left(), " bytes that follow hold at most ",
           left() / least);
    }
    return count;
  }

  GgufType ReadType(const char* what) {
    const std::uint64_t start = offset_;
    const auto type = Read<std::uint32_t>(what);
    if (type > static_cast<std::uint32_t>(GgufType::kFloat64)) {
      Fail(start, what, " is ", type, "; it must be from 0 to ",
           static_cast<std::uint32_t>(GgufType::kFloat64));
    }
    return static_cast<GgufType>(type);
  }

  GgufValue ReadValue(GgufType type) {
    switch (type) {
      case GgufType::kUint8:
        return std::uint64_t{Read<std::uint8_t>("a value")};
      case GgufType::kInt8:
        return std::int64_t{Read<std::int8_t>("a value")};
      case GgufType::kUint16:
        return std::uint64_t{Read<std::uint16_t>("a value")};
      case GgufType::kInt16:
        return std::int64_t{Read<std::int16_t>("a value")};
      case GgufType::kUint32:
        return std::uint64_t{Read<std::uint32_t>("a value")};
      case GgufType::kInt32:
        return std::int64_t{Read<std::int32_t>("a value")};
      case GgufType::kUint64:
        return Read<std::uint64_t>("a value");
      case GgufType::kInt64:
        return Read<std::int64_t>("a value");
      case GgufType::kFloat32:
        return double{Read<float>("a value")};
      case GgufType::kFloat64:
        return Read<double>("a value");
      case GgufType::kBool:
        return ReadBool();
      case GgufType::kString:
        return ReadText("a value");
      case GgufType::kArray:
        return ReadArray();
    }
    return {};
  }

 private:
  bool ReadBool() {
    const auto value = Read<std::uint8_t>("a value");
    if (value > 1) Fail(offset_ - 1, "a bool is ", int{value}, "; it must be 0 or 1");
    return value == 1;
  }

  GgufArray ReadArray() {
    const std::uint64_t start = offset_;
    const GgufType element = ReadType("the type of an array");
    if (element == GgufType::kArray) Fail(start, "arrays of arrays are not supported");
    const std::uint64_t count = ReadCount("the length of an array", SizeOf(element));
    const std::uint64_t begin = offset_;
    if (element == GgufType::kString) {
      for (std::uint64_t i = 0; i < count; ++i) ReadText("an element");
    } else {
      Take(count * SizeOf(element), "an array");
    }
    return {element, count, bytes_.subspan(begin, offset_ - begin)};
  }

  const std::span<const std::byte> bytes_;
  const std::string& name_;
  std::uint64_t offset_ = 0;
};

void ReadHeader(Reader& reader) {
  const auto magic = reader.Take(4, "a GGUF file");
  if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
    reader.Fail(0, "this is no GGUF file: it starts with '",
                Shown({reinterpret_cast<const char*>(magic.data()), 4}), "', not with 'GGUF'");
  }
  const auto version = reader.Read<std::uint32_t>("the version");
  if (version >> 16 != 0) reader.Fail(4, "big-endian GGUF files are not supported");
  if (version < 2 || version > 3) {
    reader.Fail(4, "the version of GGUF is ", version, "; 2 and 3 are supported");
  }
}

// A tensor without its data, of which it gives the offset in the data section.
std::pair<GgufTensor, std::uint64_t> ReadTensorInfo(Reader& reader) {
  GgufTensor tensor{
      .name = {}, .type = 0, .shape = {1, 1, 1, 1}, .data = {}, .info_offset = reader.offset()};
  tensor.name = reader.ReadText("the name of a tensor");
  const auto fail = [&](const auto&... parts) {
    reader.Fail(tensor.info_offset, "tensor '", Shown(tensor.name), "' ", parts...);
  };
  const auto dims = reader.Read<std::uint32_t>("the dimensions of a tensor");
  if (dims < 1 || dims > tensor.shape.size()) fail("has ", dims, " dimensions; 1 to 4 are allowed");
  std::int64_t elements = 1;
  for (std::uint32_t i = 0; i < dims; ++i) {
    const auto extent = reader.Read<std::uint64_t>("a dimension of a tensor");
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 64;
    if (extent < 1 || extent > static_cast<std::uint64_t>(kMost / elements)) {
      fail("has a dimension of ", extent,
           "; it must be at least 1, and the size must not overflow");
    }
    tensor.shape[i] = static_cast<std::int64_t>(extent);
    elements *= tensor.shape[i];
  }
  const auto type = reader.Read<std::uint32_t>("the type of a tensor");
  if (type >= GGML_TYPE_COUNT || ggml_type_size(static_cast<ggml_type>(type)) == 0) {
    fail("has type ", type, ", which ggml does not know");
  }
  tensor.type = static_cast<int>(type);
  const std::int64_t block = ggml_blck_size(static_cast<ggml_type>(type));
  if (tensor.shape[0] % block != 0) {
    fail("has rows of ", tensor.shape[0], " elements; ",
         ggml_type_name(static_cast<ggml_type>(type)), " needs a multiple of ", block);
  }
  return {tensor, reader.Read<std::uint64_t>("the offset of a tensor")};
}

std::uint64_t Bytes(const GgufTensor& tensor) {
  const auto type = static_cast<ggml_type>(tensor.type);
  std::uint64_t elements = 1;
  for (const std::int64_t extent : tensor.shape) elements *= static_cast<std::uint64_t>(extent);
  // At most 64 bytes an element, so this does not overflow.
  return elements / static_cast<std::uint64_t>(ggml_blck_size(type)) * ggml_type_size(type);
}

void RequireApart(const Reader& reader, const std::vector<GgufTensor>& tensors) {
  std::vector<const GgufTensor*> sorted;
  sorted.reserve(tensors.size());
  for (const GgufTensor& tensor : tensors) sorted.push_back(&tensor);
  std::ranges::sort(sorted, {}, [](const GgufTensor* t) { return t->data.data(); });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const GgufTensor& before = *sorted[i - 1];
    if (before.data.data() + before.data.size() > sorted[i]->data.data()) {
      reader.Fail(sorted[i]->info_offset, "tensor '", Shown(sorted[i]->name), "' overlaps tensor '",
                  Shown(before.name), "'");
    }
  }
}

}  // namespace

std::string Shown(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, kShownText)) {
    shown += c >= ' ' && c <= '~' ? c : '?';
  }
  if (text.size() > kShownText) shown += "…";
  return shown;
}

const char* GgufTensor::TypeName() const { return ggml_type_name(static_cast<ggml_type>(type)); }

std::string GgufTensor::Describe() const {
  std::string text = "'";
  text.append(Shown(name)).append("' (").append(TypeName());
  const char* separator = ", ";
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 1 && i > 0 && separator[0] == ',') continue;
    text.append(separator).append(std::to_string(shape[i]));
    separator = " x ";
  }
  return text + ")";
}

Gguf::Gguf(std::span<const std::byte> bytes, std::string name) : name_(std::move(name)) {
  Reader reader(bytes, name_);
  ReadHeader(reader);
  constexpr std::uint64_t kLeastInfo = 8 + 4 + 8 + 4 + 8;  // of a tensor
  constexpr std::uint64_t kLeastValue = 8 + 4 + 1;
  const std::uint64_t tensors = reader.ReadCount("the number of tensors", kLeastInfo);
  const std::uint64_t values = reader.ReadCount("the number of values", kLeastValue);
  for (std::uint64_t i = 0; i < values; ++i) {
    const std::uint64_t start = reader.offset();
    const std::string_view key = reader.ReadText("a key");
    const GgufType type = reader.ReadType("the type of a value");
    if (!values_.emplace(key, reader.ReadValue(type)).second) {
      reader.Fail(start, "the key '", Shown(key), "' comes twice");
    }
  }
  std::vector<std::uint64_t> offsets;
  for (std::uint64_t i = 0; i < tensors; ++i) {
    const auto [tensor, offset] = ReadTensorInfo(reader);
    if (!places_.emplace(tensor.name, tensors_.size()).second) {
      reader.Fail(tensor.info_offset, "tensor '", Shown(tensor.name), "' comes twice");
    }
    tensors_.push_back(tensor);
    offsets.push_back(offset);
  }
  const auto alignment = static_cast<std::uint64_t>(
      Integer("general.alignment", 8, static_cast<std::int64_t>(kMaxAlignment), 32));
  if (!std::has_single_bit(alignment)) {
    reader.Fail(0, "general.alignment is ", alignment, "; it must be a power of two");
  }
  // A file without tensors, of a vocabulary say, may end before its data would begin.
  const std::uint64_t begin = std::min<std::uint64_t>(
      (reader.offset() + alignment - 1) / alignment * alignment, bytes.size());
  const auto data = bytes.subspan(begin);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    GgufTensor& tensor = tensors_[i];
    const std::uint64_t size = Bytes(tensor);
    if (offsets[i] % alignment != 0) {
      reader.Fail(tensor.info_offset, "tensor '", Shown(tensor.name), "' has offset ", offsets[i],
                  "; it must be a multiple of ", alignment);
    }
    if (offsets[i] > data.size() || size > data.size() - offsets[i]) {
      reader.Fail(tensor.info_offset, "tensor '", Shown(tensor.name), "' is at ", offsets[i],
                  " of the data and has ", size, " bytes; there are ", data.size());
    }
    tensor.data = data.subspan(offsets[i], size);
  }
  RequireApart(reader, tensors_);
}

const GgufTensor* Gguf::FindTensor(std::string_view tensor) const {
  const auto found = places_.find(tensor);
  return found == places_.end() ? nullptr : &tensors_[found->second];
}

const GgufValue* Gguf::FindValue(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const GgufValue& Gguf::Value(std::string_view key) const {
  const GgufValue* value = FindValue(key);
  if (value == nullptr) Throw<FormatError>("'", name_, "' has no value for the key '", key, "'");
  return *value;
}

std::int64_t Gguf::Integer(std::string_view key, std::int64_t least, std::int64_t most) const {
  const GgufValue& value = Value(key);
  const auto fail = [&](const auto& given) {
    Throw<FormatError>("'", name_, "': ", key, " is ", given, "; it must be a whole number from ",
                       least, " to ", most);
  };
  std::int64_t number = 0;
  if (const auto* positive = std::get_if<std::uint64_t>(&value)) {
    if (!std::in_range<std::int64_t>(*positive)) fail(*positive);
    number = static_cast<std::int64_t>(*positive);
  } else if (const auto* any = std::get_if<std::int64_t>(&value)) {
    number = *any;
  } else {
    fail("of another type");
  }
  if (number < least || number > most) fail(number);
  return number;
}

std::int64_t Gguf::Integer(std::string_view key, std::int64_t least, std::int64_t most,
                           std::int64_t otherwise) const {
  return FindValue(key) == nullptr ? otherwise : Integer(key, least, most);
}

double Gguf::Number(std::string_view key, double least, double most) const {
  const GgufValue& value = Value(key);
  const auto* number = std::get_if<double>(&value);
  if (number == nullptr || !(*number >= least) || !(*number <= most)) {
    std::ostringstream given;
    if (number == nullptr) {
      given << "of another type";
    } else {
      given << *number;
    }
    Throw<FormatError>("'", name_, "': ", key, " is ", given.str(), "; it must be a number from ",
                       least, " to ", most);
  }
  return *number;
}

double Gguf::Number(std::string_view key, double least, double most, double otherwise) const {
  return FindValue(key) == nullptr ? otherwise : Number(key, least, most);
}

std::string_view Gguf::Text(std::string_view key) const {
  const auto* text = std::get_if<std::string_view>(&Value(key));
  if (text == nullptr) Throw<FormatError>("'", name_, "': ", key, " is no text; it must be");
  return *text;
}

std::string_view Gguf::Text(std::string_view key, std::string_view otherwise) const {
  return FindValue(key) == nullptr ? otherwise : Text(key);
}

std::vector<std::string_view> Gguf::Texts(std::string_view key) const {
  const auto* array = std::get_if<GgufArray>(&Value(key));
  if (array == nullptr || array->element != GgufType::kString) {
    Throw<FormatError>("'", name_, "': ", key, " is no array of texts; it must be");
  }
  Reader reader(array->bytes, name_);
  std::vector<std::string_view> texts;
  for (std::uint64_t i = 0; i < array->count; ++i) texts.push_back(reader.ReadText("a text"));
  return texts;
}

}  // namespace treeline::model
