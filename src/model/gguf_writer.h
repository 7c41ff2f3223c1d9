#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace treeline::model {

// Writes a GGUF file, version 3: values and tensors are described first, then the data follow, a
// piece at a time.
class GgufWriter {
 public:
  void Set(std::string_view key, std::uint32_t value);
  void Set(std::string_view key, float value);
  void Set(std::string_view key, bool value);
  void Set(std::string_view key, std::string_view value);
  void Set(std::string_view key, std::span<const std::string> values);
  void Set(std::string_view key, std::span<const std::int32_t> values);

  // `shape` is the innermost first; `bytes` must be what its type makes of it.
  void AddTensor(std::string_view name, int type, std::span<const std::int64_t> shape,
                 std::uint64_t bytes);

  // Where what is written goes.
  using Sink = std::function<void(std::span<const std::byte> bytes)>;

  // Writes everything up to the data of the first tensor.
  void WriteHead(const Sink& sink) const;
  // Zeros that follow the data of a tensor.
  static std::uint64_t Padding(std::uint64_t bytes);

 private:
  static constexpr std::uint64_t kAlignment = 32;

  std::vector<std::byte> values_;
  std::vector<std::byte> tensors_;
  std::uint64_t value_count_ = 0;
  std::uint64_t tensor_count_ = 0;
  std::uint64_t offset_ = 0;  // of the next tensor's data
};

}  // namespace treeline::model
