#include "model/linear.h"

#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>

#include "backend/cpu/multiply.h"
#include "backend/cpu/parallel.h"
#include "core/check.h"

namespace treeline::model {
namespace {

void ReadRow(const void* matrix, std::int64_t row, std::int64_t begin, std::int64_t end,
             float* target) noexcept {
  static_cast<const Matrix*>(matrix)->Read(row, begin, end, target);
}

}  // namespace

Linear::Linear(const Context& context, Activations activations)
    : context_(context), activations_(activations) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    Throw<DeviceError>("models need a CPU with AVX2 and FMA, which this one does not have");
  }
#endif
  static const bool ready = (ggml_cpu_init(), true);  // tables that its kernels use
  static_cast<void>(ready);
}

void Linear::Multiply(const Matrix& matrix, std::int64_t row_begin, std::int64_t row_end,
                      const float* x, std::int64_t tokens, bool few, float* out,
                      std::int64_t out_stride) {
  if (tokens == 0 || row_begin == row_end) return;
  const ggml_type_traits_cpu& traits =
      *ggml_get_type_traits_cpu(static_cast<ggml_type>(matrix.type));
  if (activations_ == Activations::kF32 || !few || traits.vec_dot == nullptr) {
    return cpu::Multiply(context_,
                         {.read = ReadRow,
                          .matrix = &matrix,
                          .row_begin = row_begin,
                          .row_end = row_end,
                          .columns = matrix.columns},
                         x, matrix.columns, tokens, out, out_stride);
  }
  const void* operand = x;
  std::size_t operand_bytes = static_cast<std::size_t>(matrix.columns) * sizeof(float);
  if (traits.vec_dot_type != GGML_TYPE_F32) {
    const auto quantize = ggml_get_type_traits_cpu(traits.vec_dot_type)->from_float;
    operand_bytes = ggml_row_size(traits.vec_dot_type, matrix.columns);
    quantized_.resize(
        std::max(quantized_.size(), operand_bytes * static_cast<std::size_t>(tokens)));
    for (std::int64_t t = 0; t < tokens; ++t) {
      quantize(x + t * matrix.columns,
               quantized_.data() + operand_bytes * static_cast<std::size_t>(t), matrix.columns);
    }
    operand = quantized_.data();
  }
  // As many items as keep all threads busy to the end, of whole pages or so.
  const std::int64_t rows = row_end - row_begin;
  const std::int64_t item_rows =
      std::clamp<std::int64_t>(rows / (std::int64_t{8} * cpu::Threads(context_)), 16, 256);
  cpu::ForEach(context_, (rows + item_rows - 1) / item_rows, [&](std::int64_t item, int) {
    const std::int64_t last = std::min(rows, (item + 1) * item_rows);
    for (std::int64_t row = item * item_rows; row < last; ++row) {
      const std::byte* weights = matrix.Row(row_begin + row);
      for (std::int64_t t = 0; t < tokens; ++t) {
        traits.vec_dot(
            static_cast<int>(matrix.columns), out + t * out_stride + row, 0, weights, 0,
            static_cast<const std::byte*>(operand) + operand_bytes * static_cast<std::size_t>(t), 0,
            1);
      }
    }
  });
}

}  // namespace treeline::model
