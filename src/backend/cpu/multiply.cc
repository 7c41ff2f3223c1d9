#include "backend/cpu/multiply.h"

#include <algorithm>
#include <vector>

#include "backend/cpu/parallel.h"
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

void MultiplyFew(const Context& context, std::span<const PackedProduct> products, const float* x,
                 std::int64_t columns, std::int64_t tokens) {
  const KernelTable& table = TableFor(context);
  const std::int64_t blocks = columns / kFineBlock;
  const auto token_bytes = static_cast<std::size_t>(columns * std::int64_t{sizeof(std::int16_t)} +
                                                    2 * blocks * std::int64_t{sizeof(float)});
  const TrackedBuffer buffer(token_bytes * static_cast<std::size_t>(tokens), Purpose::kWorkspace,
                             context.memory);
  std::vector<FineRow> fine;
  fine.reserve(static_cast<std::size_t>(tokens));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::byte* place = buffer.data() + token_bytes * static_cast<std::size_t>(t);
    auto* scales = reinterpret_cast<float*>(place);
    fine.push_back({.values = reinterpret_cast<std::int16_t*>(scales + 2 * blocks),
                    .scales = scales,
                    .sums = scales + blocks});
    table.refine_row(x + t * columns, static_cast<int>(columns), fine.back());
  }
  std::int64_t rows = 0;  // of all products
  for (const PackedProduct& product : products) rows += product.rows.end - product.rows.begin;
  // As many items as keep all threads busy to the end, and no fewer rows than start a stream.
  const std::int64_t item_rows =
      std::clamp<std::int64_t>(rows / (std::int64_t{8} * Threads(context)), 16, 256);
  const auto items_of = [&](const PackedProduct& product) {
    return (product.rows.end - product.rows.begin + item_rows - 1) / item_rows;
  };
  std::int64_t items = 0;
  for (const PackedProduct& product : products) items += items_of(product);
  ForEach(context, items, [&](std::int64_t item, int) {
    const PackedProduct* product = products.data();
    for (; item >= items_of(*product); ++product) item -= items_of(*product);
    const PackedRows& source = product->rows;
    const std::int64_t first = item * item_rows;
    table.dot_rows(
        {.format = source.format,
         .weights = source.data + static_cast<std::size_t>(source.begin + first) * source.row_bytes,
         .row_bytes = source.row_bytes,
         .rows = static_cast<int>(std::min(item_rows, source.end - source.begin - first)),
         .columns = static_cast<int>(columns),
         .x = fine.data(),
         .tokens = static_cast<int>(tokens),
         .out = product->out + first,
         .out_stride = product->out_stride});
  });
}

}  // namespace treeline::cpu
