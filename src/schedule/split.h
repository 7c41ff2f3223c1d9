#pragma once

#include <cstddef>

namespace treeline {

// Items [begin, end).
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t size() const { return end - begin; }
};

// The part of `count` items that falls to rank r of n: near-equal, in order.
inline Range Share(std::size_t count, int n, int r) {
  const auto parts = static_cast<std::size_t>(n);
  const auto part = static_cast<std::size_t>(r);
  const std::size_t even = count / parts;
  const std::size_t rest = count % parts;  // the first `rest` ranks have one more
  const std::size_t begin = part * even + (part < rest ? part : rest);
  return {begin, begin + even + (part < rest ? 1 : 0)};
}

}  // namespace treeline
