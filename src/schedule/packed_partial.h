#pragma once

#include <algorithm>
#include <array>

#include "treeline/backend.h"
#include "treeline/comm.h"

namespace treeline {

// A partial in one piece of memory, as it is sent: [rows, v_head_dim] out, then [rows] lse.
class PackedPartial {
 public:
  PackedPartial(Backend& backend, std::size_t rows, int v_head_dim, Purpose purpose)
      : rows_(rows),
        dim_(v_head_dim),
        buffer_(backend.Allocate(Bytes(rows, v_head_dim), purpose)) {}

  static std::size_t Bytes(std::size_t rows, int v_head_dim) {
    return rows * (static_cast<std::size_t>(v_head_dim) + 1) * sizeof(float);
  }

  std::size_t rows() const { return rows_; }
  treeline::Bytes bytes() const { return {buffer_.data(), buffer_.size()}; }
  Partial all() const { return Rows(0, rows_); }

  // Rows [begin, end) where they lie.
  Partial Rows(std::size_t begin, std::size_t end) const {
    auto* out = reinterpret_cast<float*>(buffer_.data());
    const auto dim = static_cast<std::size_t>(dim_);
    return {
        {out + begin * dim, (end - begin) * dim}, {out + rows_ * dim + begin, end - begin}, dim_};
  }

 private:
  std::size_t rows_;
  int dim_;
  TrackedBuffer buffer_;
};

// A partial of `rows` rows that lies packed at `bytes`.
inline Partial PartialAt(std::byte* bytes, std::size_t rows, int v_head_dim) {
  auto* out = reinterpret_cast<float*>(bytes);
  const std::size_t values = rows * static_cast<std::size_t>(v_head_dim);
  return {{out, values}, {out + values, rows}, v_head_dim};
}

// The two pieces of a partial, in the order of a packed one.
inline std::array<ConstBytes, 2> PiecesOf(const Partial& partial) {
  return {std::as_bytes(partial.out), std::as_bytes(partial.lse)};
}

inline void Copy(const Partial& source, const Partial& target) {
  std::copy(source.out.begin(), source.out.end(), target.out.begin());
  std::copy(source.lse.begin(), source.lse.end(), target.lse.begin());
}

}  // namespace treeline
