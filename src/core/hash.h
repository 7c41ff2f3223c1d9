#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace treeline {

// FNV-1a: for short inputs, against accidents and not against an adversary.
class Hash {
 public:
  void Add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      value_ = (value_ ^ static_cast<std::uint64_t>(byte)) * 1099511628211u;
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037u;
};

}  // namespace treeline
