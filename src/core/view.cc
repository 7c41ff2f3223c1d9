#include "treeline/view.h"

#include "core/check.h"

namespace treeline {
namespace {

// `count` rows of `row` bytes.
std::int64_t Bytes(std::int64_t count, std::int64_t row) {
  std::int64_t bytes = 0;
  Require(!__builtin_mul_overflow(count, row, &bytes), count, " rows of ", row,
          " bytes are too large to address");
  return bytes;
}

}  // namespace

TensorView TensorView::Dense(const void* data, DType dtype, std::int64_t tokens, int heads,
                             int dim) {
  const auto row = static_cast<std::int64_t>(RowBytes(dtype, dim));
  return {data, dtype, tokens, heads, dim, Bytes(heads, row), row};
}

GradView GradView::Dense(float* data, std::int64_t tokens, int heads, int dim) {
  const std::int64_t row = std::int64_t{dim} * static_cast<std::int64_t>(sizeof(float));
  return {data, tokens, heads, dim, Bytes(heads, row), row};
}

KvView KvView::Strided(const TensorView& k, const TensorView& v) {
  Require(k.tokens == v.tokens, "keys have ", k.tokens, " tokens and values ", v.tokens,
          "; they must be the same");
  Require(k.heads == v.heads, "keys have ", k.heads, " heads and values ", v.heads,
          "; they must be the same");
  Require(k.dtype == v.dtype, "keys are ", Name(k.dtype), " and values ", Name(v.dtype),
          "; they must be the same");
  KvView view;
  view.k = {k.data, nullptr, k.token_stride, k.head_stride, k.dim};
  view.v = {v.data, nullptr, v.token_stride, v.head_stride, v.dim};
  view.dtype = k.dtype;
  view.slots = k.tokens;
  view.kv_heads = k.heads;
  return view;
}

KvView KvView::Paged(std::span<const void* const> k_pages, std::span<const void* const> v_pages,
                     DType dtype, std::int64_t slots, std::int64_t page_slots, int kv_heads,
                     int head_dim, int v_head_dim) {
  Require(page_slots >= 1, "page_slots is ", page_slots, "; it must be positive");
  Require(slots >= 0, "slots is ", slots, "; it must not be negative");
  const std::uint64_t needed =
      slots == 0
          ? 0
          : (static_cast<std::uint64_t>(slots) - 1) / static_cast<std::uint64_t>(page_slots) + 1;
  Require(k_pages.size() >= needed && v_pages.size() >= needed, slots, " slots need ", needed,
          " pages of ", page_slots, "; there are ", k_pages.size(), " for keys and ",
          v_pages.size(), " for values");
  for (std::uint64_t page = 0; page < needed; ++page) {
    Require(k_pages[page] != nullptr && v_pages[page] != nullptr, "page ", page, " is null");
  }
  const auto k_row = static_cast<std::int64_t>(RowBytes(dtype, head_dim));
  const auto v_row = static_cast<std::int64_t>(RowBytes(dtype, v_head_dim));
  KvView view;
  view.k = {nullptr, k_pages.data(), k_row, Bytes(page_slots, k_row), head_dim};
  view.v = {nullptr, v_pages.data(), v_row, Bytes(page_slots, v_row), v_head_dim};
  view.dtype = dtype;
  view.slots = slots;
  view.page_slots = page_slots;
  view.kv_heads = kv_heads;
  return view;
}

}  // namespace treeline
