#pragma once

#include <cstdint>
#include <span>

#include "treeline/dtype.h"

namespace treeline {

// A view borrows memory: the caller keeps it alive and unchanged during a call. Strides are bytes.

// Read-only [tokens, heads, dim].
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  // Rows packed one after the other. Throws ArgumentError if a token is too large to address.
  static TensorView Dense(const void* data, DType dtype, std::int64_t tokens, int heads, int dim);

  const std::byte* Row(std::int64_t token, int head) const {
    return static_cast<const std::byte*>(data) + token * token_stride + head * head_stride;
  }
};

// Writable f32 [tokens, heads, dim]; gradients are added to what is there.
struct GradView {
  float* data = nullptr;
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  static GradView Dense(float* data, std::int64_t tokens, int heads, int dim);

  float* Row(std::int64_t token, int head) const {
    return reinterpret_cast<float*>(reinterpret_cast<std::byte*>(data) + token * token_stride +
                                    head * head_stride);
  }
};

// Keys or values: slots in one strided tensor, or in pages of equal size.
struct KvSide {
  const void* base = nullptr;          // strided: the address of slot 0
  const void* const* pages = nullptr;  // paged: the address of each page's first slot
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
  int dim = 0;  // elements of a row

  const std::byte* Row(std::int64_t slot, int head, std::int64_t page_slots) const {
    const void* start = pages == nullptr ? base : pages[slot / page_slots];
    const std::int64_t offset = pages == nullptr ? slot : slot % page_slots;
    return static_cast<const std::byte*>(start) + offset * slot_stride + head * head_stride;
  }
};

// The keys and values that a kernel reads where they lie. Slots are in increasing position.
struct KvView {
  KvSide k;
  KvSide v;
  DType dtype = DType::kF32;
  std::int64_t slots = 0;       // in use; slots beyond are never read
  std::int64_t page_slots = 0;  // slots of a page; 0 when strided
  int kv_heads = 0;

  // [slot, kv_head, dim] tensors. Throws ArgumentError if they differ in tokens, heads or dtype.
  static KvView Strided(const TensorView& k, const TensorView& v);

  // Pages of [kv_head, slot, dim], as a cache holds them. Page p holds slots [p * page_slots, …).
  // The arrays of page addresses are borrowed too. Throws ArgumentError if a page is missing, null
  // or too large to address.
  static KvView Paged(std::span<const void* const> k_pages, std::span<const void* const> v_pages,
                      DType dtype, std::int64_t slots, std::int64_t page_slots, int kv_heads,
                      int head_dim, int v_head_dim);

  const std::byte* KeyRow(std::int64_t slot, int head) const {
    return k.Row(slot, head, page_slots);
  }
  const std::byte* ValueRow(std::int64_t slot, int head) const {
    return v.Row(slot, head, page_slots);
  }
};

}  // namespace treeline
