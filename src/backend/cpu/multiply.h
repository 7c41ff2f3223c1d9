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

struct WideProduct {
  RowSource rows;
  float* out;  // [tokens, rows]; a token's are out_stride floats apart
  std::int64_t out_stride;
};

// out = x [tokens, columns] * rows^T, of each of some products, all of as many columns. Tokens of x
// are x_stride floats apart. An element's bits depend on its own token and row only. Needs about
// 200 KB a thread. Threads meet once.
void Multiply(const Context& context, std::span<const WideProduct> products, const float* x,
              std::int64_t x_stride, std::int64_t tokens);

// What activations become in products of bf16.
enum class Bf16Terms : std::uint8_t {
  kOne = 1,  // rounded to 8 bits
  kTwo = 2,  // a sum of two such numbers: 16 bits, and twice the work
};

// Whether a context's instruction set multiplies in bf16.
bool MultipliesInBf16(const Context& context);

// The same with weights rounded to bf16, if MultipliesInBf16(context). Also needs 2 bytes for each
// term of x. Threads meet twice.
void MultiplyInBf16(const Context& context, std::span<const WideProduct> products, const float* x,
                    std::int64_t x_stride, std::int64_t tokens, Bf16Terms terms);

// Whether a context's instruction set multiplies whole numbers of 16 bits faster than floats.
bool MultipliesInI16(const Context& context);

// The same with weights and activations rounded to 14 bits, 32 with a scale each, if
// MultipliesInI16(context). Also needs about 2 bytes for each element of x. Threads meet twice.
void MultiplyInI16(const Context& context, std::span<const WideProduct> products, const float* x,
                   std::int64_t x_stride, std::int64_t tokens);

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
// row is read once. Columns are whole blocks of all formats. Threads meet once.
void MultiplyFew(const Context& context, std::span<const PackedProduct> products, const float* x,
                 std::int64_t columns, std::int64_t tokens);

}  // namespace treeline::cpu
