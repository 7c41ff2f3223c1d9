#include "model/linear.h"

#include <ggml.h>

#include <optional>

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
}

void Linear::Multiply(const Matrix& matrix, std::int64_t row_begin, std::int64_t row_end,
                      const float* x, std::int64_t tokens, bool few, float* out,
                      std::int64_t out_stride) const {
  if (tokens == 0 || row_begin == row_end) return;
  const std::optional<cpu::RowFormat> format = FormatOf(matrix.type);
  if (few && activations_ == Activations::kI16 && format) {
    return cpu::MultiplyFew(context_,
                            {.format = *format,
                             .data = matrix.data,
                             .row_bytes = matrix.row_bytes,
                             .row_begin = row_begin,
                             .row_end = row_end,
                             .columns = matrix.columns},
                            x, matrix.columns, tokens, out, out_stride);
  }
  cpu::Multiply(context_,
                {.read = ReadRow,
                 .matrix = &matrix,
                 .row_begin = row_begin,
                 .row_end = row_end,
                 .columns = matrix.columns},
                x, matrix.columns, tokens, out, out_stride);
}

}  // namespace treeline::model
