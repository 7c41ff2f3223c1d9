#include "backend/cpu/multiply.h"

#include <algorithm>

#include "backend/cpu/parallel.h"
#include "kernels/cpu/kernel_table.h"
#include "treeline/memory.h"

namespace treeline::cpu {
namespace {

constexpr std::int64_t kDepth = 512;  // columns of a tile: what is packed of a panel stays in L1
constexpr std::int64_t kPanels = 3;   // of an item: a block of tokens is read once for all of them
constexpr std::int64_t kTokenBlock = 48;  // whose tiles stay in L2

}  // namespace

void Multiply(const Context& context, const RowSource& source, const float* x,
              std::int64_t x_stride, std::int64_t tokens, float* out, std::int64_t out_stride) {
  const KernelTable& table = TableFor(context);
  const std::int64_t panel_rows = table.panel_rows();
  const std::int64_t item_rows = panel_rows * kPanels;
  const std::int64_t rows = source.row_end - source.row_begin;
  const std::int64_t panel_floats = panel_rows * kDepth;
  const std::int64_t workspace = panel_floats * (1 + kPanels);
  const TrackedBuffer buffer(static_cast<std::size_t>(workspace * Threads(context)) * sizeof(float),
                             Purpose::kWorkspace, context.memory);

  const auto multiply_item = [&](std::int64_t item, int thread) {
    float* const wide = reinterpret_cast<float*>(buffer.data()) + workspace * thread;
    float* const panels = wide + panel_floats;
    const std::int64_t first = item * item_rows;
    const std::int64_t last = std::min(rows, first + item_rows);
    for (std::int64_t begin = 0; begin < source.columns; begin += kDepth) {
      const std::int64_t end = std::min(source.columns, begin + kDepth);
      const int depth = static_cast<int>(end - begin);
      for (std::int64_t row = first; row < last; row += panel_rows) {
        const std::int64_t count = std::min(panel_rows, last - row);
        for (std::int64_t r = 0; r < count; ++r) {
          source.read(source.matrix, source.row_begin + row + r, begin, end, wide + r * kDepth);
        }
        table.pack_panel({.source = wide,
                          .stride = kDepth,
                          .rows = static_cast<int>(count),
                          .depth = depth,
                          .panel = panels + (row - first) * kDepth});
      }
      for (std::int64_t token = 0; token < tokens; token += kTokenBlock) {
        for (std::int64_t row = first; row < last; row += panel_rows) {
          table.multiply_panel({.a = x + token * x_stride + begin,
                                .a_stride = x_stride,
                                .panel = panels + (row - first) * kDepth,
                                .tokens = static_cast<int>(std::min(kTokenBlock, tokens - token)),
                                .rows = static_cast<int>(std::min(panel_rows, last - row)),
                                .depth = depth,
                                .c = out + token * out_stride + row,
                                .c_stride = out_stride,
                                .add = begin > 0});
        }
      }
    }
  };
  ForEach(context, (rows + item_rows - 1) / item_rows, multiply_item);
}

}  // namespace treeline::cpu
