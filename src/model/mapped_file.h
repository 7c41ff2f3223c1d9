#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace treeline::model {

// A file, read where it lies: processes of a host that map the same one share its memory.
class MappedFile {
 public:
  // Throws FormatError if there is no such file, or it cannot be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace treeline::model
