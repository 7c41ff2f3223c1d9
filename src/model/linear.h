#pragma once

#include <cstdint>
#include <span>

#include "model/llama_model.h"
#include "treeline/context.h"

namespace treeline::model {

// How activations enter products with weights.
enum class Activations : std::uint8_t {
  kI16,   // as 16-bit whole numbers, 32 with a scale each. Of many tokens: those and the weights as
          // 14-bit numbers with VNNI; with AMX as sums of two bf16 numbers, and the weights as one;
          // as floats without either
  kBf16,  // of many tokens: as bf16, in attention, too; needs an instruction set that multiplies it
  kF32,   // always as floats: slower, and exact but for rounding
};

// Rows [row_begin, row_end) of a matrix, and where their products with tokens go: out [tokens,
// rows], of which a token's are out_stride floats after those of the one before.
struct Product {
  const Matrix* matrix;
  std::int64_t row_begin;
  std::int64_t row_end;
  float* out;
  std::int64_t out_stride;
};

// Products of activations with a model's matrices, by the threads of a context.
class Linear {
 public:
  Linear(const Context& context, Activations activations);

  // Up to this many tokens of all ranks are few: each row is read once, as it is packed. More are
  // worth widening it.
  static constexpr std::int64_t kFewTokens = 8;

  // out = x [tokens, columns] * rows^T, of each of some products, whose matrices have the same
  // columns. The bits of an element depend only on its token, its row and `few`: whether the tokens
  // of all ranks are, which the number of ranks must not change.
  void Multiply(std::span<const Product> products, const float* x, std::int64_t tokens,
                bool few) const;

 private:
  const Context context_;
  const Activations activations_;
};

}  // namespace treeline::model
