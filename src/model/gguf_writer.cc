#include "model/gguf_writer.h"

#include "model/gguf.h"

namespace treeline::model {
namespace {

void Append(std::vector<std::byte>& target, std::span<const std::byte> bytes) {
  target.insert(target.end(), bytes.begin(), bytes.end());
}

template <class T>
void AppendNumber(std::vector<std::byte>& target, const T& value) {
  Append(target, std::as_bytes(std::span(&value, 1)));
}

void AppendText(std::vector<std::byte>& target, std::string_view text) {
  AppendNumber(target, std::uint64_t{text.size()});
  Append(target, std::as_bytes(std::span(text)));
}

void AppendKey(std::vector<std::byte>& target, std::string_view key, GgufType type) {
  AppendText(target, key);
  AppendNumber(target, static_cast<std::uint32_t>(type));
}

}  // namespace

void GgufWriter::Set(std::string_view key, std::uint32_t value) {
  AppendKey(values_, key, GgufType::kUint32);
  AppendNumber(values_, value);
  ++value_count_;
}

void GgufWriter::Set(std::string_view key, float value) {
  AppendKey(values_, key, GgufType::kFloat32);
  AppendNumber(values_, value);
  ++value_count_;
}

void GgufWriter::Set(std::string_view key, bool value) {
  AppendKey(values_, key, GgufType::kBool);
  AppendNumber(values_, static_cast<std::uint8_t>(value ? 1 : 0));
  ++value_count_;
}

void GgufWriter::Set(std::string_view key, std::string_view value) {
  AppendKey(values_, key, GgufType::kString);
  AppendText(values_, value);
  ++value_count_;
}

void GgufWriter::Set(std::string_view key, std::span<const std::string> values) {
  AppendKey(values_, key, GgufType::kArray);
  AppendNumber(values_, static_cast<std::uint32_t>(GgufType::kString));
  AppendNumber(values_, std::uint64_t{values.size()});
  for (const std::string& value : values) AppendText(values_, value);
  ++value_count_;
}

void GgufWriter::Set(std::string_view key, std::span<const std::int32_t> values) {
  AppendKey(values_, key, GgufType::kArray);
  AppendNumber(values_, static_cast<std::uint32_t>(GgufType::kInt32));
  AppendNumber(values_, std::uint64_t{values.size()});
  Append(values_, std::as_bytes(values));
  ++value_count_;
}

void GgufWriter::AddTensor(std::string_view name, int type, std::span<const std::int64_t> shape,
                           std::uint64_t bytes) {
  AppendText(tensors_, name);
  AppendNumber(tensors_, static_cast<std::uint32_t>(shape.size()));
  for (const std::int64_t extent : shape) AppendNumber(tensors_, extent);
  AppendNumber(tensors_, static_cast<std::uint32_t>(type));
  AppendNumber(tensors_, offset_);
  offset_ += bytes + Padding(bytes);
  ++tensor_count_;
}

void GgufWriter::WriteHead(const Sink& sink) const {
  constexpr std::uint32_t kVersion = 3;
  std::vector<std::byte> head;
  Append(head, std::as_bytes(std::span("GGUF", 4)));
  AppendNumber(head, kVersion);
  AppendNumber(head, tensor_count_);
  AppendNumber(head, value_count_);
  Append(head, values_);
  Append(head, tensors_);
  head.resize(head.size() + Padding(head.size()));
  sink(head);
}

std::uint64_t GgufWriter::Padding(std::uint64_t bytes) {
  return (kAlignment - bytes % kAlignment) % kAlignment;
}

}  // namespace treeline::model
