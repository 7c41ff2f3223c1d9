#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/kernel_table.h"
#include "treeline/context.h"

namespace treeline::cpu {

// A matrix whose rows are widened to floats piece by piece, so that it may be quantized.
struct RowSource {
  // target[0, end - begin) = row[begin, end). Both ends are multiples of 256, or the row's own.
  void (*read)(const void* matrix, std::int64_t row, std::int64_t begin, std::int64_t end,
               float* target) noexcept;
  const void* matrix;
  std::int64_t row_begin;  // rows [row_begin, row_end) of the matrix are multiplied
  std::int64_t row_end;
  std::int64_t columns;  // a multiple of 4
};

// out [tokens, rows] = x [tokens, columns] * rows^T. Rows of x and out are so many floats apart. An
// element's bits depend on its own token and row only. Needs about 200 KB a thread.
void Multiply(const Context& context, const RowSource& rows, const float* x, std::int64_t x_stride,
              std::int64_t tokens, float* out, std::int64_t out_stride);

// Rows [begin, end) of packed weights, where they lie.
struct PackedRows {
  RowFormat format;
  const std::byte* data;  // of the matrix
  std::size_t row_bytes;
  std::int64_t begin;
  std::int64_t end;
};

struct PackedProduct {
  PackedRows rows;
  float* out;  // [tokens, rows]; a token's are out_stride floats apart
  std::int64_t out_stride;
};

// The same for x [tokens, columns] of few tokens, whose activations are rounded to 16 bits: each
// row is read once. Columns are whole blocks of all formats. Some products at a time: threads meet
// once.
void MultiplyFew(const Context& context, std::span<const PackedProduct> products, const float* x,
                 std::int64_t columns, std::int64_t tokens);

}  // namespace treeline::cpu
