#include "model/linear.h"

#include <ggml.h>

#include <optional>
#include <vector>

#include "backend/cpu/multiply.h"
#include "core/check.h"

namespace treeline::model {
namespace {

void ReadRow(const void* matrix, std::int64_t row, std::int64_t begin, std::int64_t end,
             float* target) noexcept {
  static_cast<const Matrix*>(matrix)->Read(row, begin, end, target);
}

// Formats that have kernels of their own; others are widened.
std::optional<cpu::RowFormat> FormatOf(int type) {
  switch (type) {
    case GGML_TYPE_Q4_0:
      return cpu::RowFormat::kQ4_0;
    case GGML_TYPE_Q4_1:
      return cpu::RowFormat::kQ4_1;
    case GGML_TYPE_Q8_0:
      return cpu::RowFormat::kQ8_0;
    case GGML_TYPE_Q4_K:
      return cpu::RowFormat::kQ4_K;
    case GGML_TYPE_Q6_K:
      return cpu::RowFormat::kQ6_K;
    default:
      return std::nullopt;
  }
}

}  // namespace

Linear::Linear(const Context& context, Activations activations)
    : context_(context), activations_(activations) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {  // ggml is built for it
    Throw<DeviceError>("models need a CPU with AVX2 and FMA, which this one does not have");
  }
#endif
  const Isa isa = context.isa ? *context.isa : DefaultIsa();
  Require(activations != Activations::kBf16 || cpu::MultipliesInBf16(context),
          "activations in bf16 need an instruction set that multiplies in it, amx or avx512-bf16; ",
          Name(isa), " does not");
}

void Linear::Multiply(std::span<const Product> products, const float* x, std::int64_t tokens,
                      bool few) const {
  if (tokens == 0 || products.empty()) return;
  std::vector<cpu::PackedProduct> packed;
  std::vector<cpu::WideProduct> wide;
  for (const Product& product : products) {
    const Matrix& matrix = *product.matrix;
    const std::optional<cpu::RowFormat> format = FormatOf(matrix.type);
    if (few && activations_ != Activations::kF32 && format) {
      packed.push_back({.rows = {.format = *format,
                                 .data = matrix.data,
                                 .row_bytes = matrix.row_bytes,
                                 .begin = product.row_begin,
                                 .end = product.row_end},
                        .out = product.out,
                        .out_stride = product.out_stride});
    } else {
      wide.push_back({.rows = {.read = ReadRow,
                               .matrix = &matrix,
                               .row_begin = product.row_begin,
                               .row_end = product.row_end,
                               .columns = matrix.columns},
                      .out = product.out,
                      .out_stride = product.out_stride});
    }
  }
  const std::int64_t columns = products[0].matrix->columns;
  if (!packed.empty()) cpu::MultiplyFew(context_, packed, x, columns, tokens);
  if (wide.empty()) return;
  const bool rounded = !few && activations_ != Activations::kF32;
  if (rounded && activations_ == Activations::kI16 && cpu::MultipliesInI16(context_)) {
    cpu::MultiplyInI16(context_, wide, x, columns, tokens);
  } else if (rounded && cpu::MultipliesInBf16(context_)) {
    cpu::MultiplyInBf16(
        context_, wide, x, columns, tokens,
        activations_ == Activations::kBf16 ? cpu::Bf16Terms::kOne : cpu::Bf16Terms::kTwo);
  } else {
    cpu::Multiply(context_, wide, x, columns, tokens);
  }
}

}  // namespace treeline::model
