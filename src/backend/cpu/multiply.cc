#include "backend/cpu/multiply.h"

#include <algorithm>
#include <vector>

#include "backend/cpu/parallel.h"
#include "kernels/cpu/bf16/product.h"
#include "treeline/memory.h"

namespace treeline::cpu {
namespace {

constexpr std::int64_t kDepth = 512;  // columns of a tile: what is packed of a panel stays in L1

std::int64_t RowsOf(const WideProduct& product) {
  return product.rows.row_end - product.rows.row_begin;
}
std::int64_t RowsOf(const PackedProduct& product) { return product.rows.end - product.rows.begin; }

// Some rows of one of several products.
template <class Product>
struct RowItem {
  const Product* product;
  std::int64_t begin;
  std::int64_t end;
};

// All rows of all products, at most `rows` of one in an item.
template <class Product>
std::vector<RowItem<Product>> CutRows(std::span<const Product> products, std::int64_t rows) {
  std::vector<RowItem<Product>> items;
  for (const Product& product : products) {
    const std::int64_t all = RowsOf(product);
    for (std::int64_t begin = 0; begin < all; begin += rows) {
      items.push_back({&product, begin, std::min(all, begin + rows)});
    }
  }
  return items;
}

// All rows of all products, in items that become shorter: `threads` of them share three quarters of
// the rows, as many the same of the rest, and so on. Each begins a stream through memory anew, so
// there should be few; yet threads should end together when one of them was held up.
std::vector<RowItem<PackedProduct>> CutRowsShorter(std::span<const PackedProduct> products,
                                                   int threads) {
  constexpr std::int64_t kFewest = 16;
  std::int64_t left = 0;
  for (const PackedProduct& product : products) left += RowsOf(product);
  std::vector<RowItem<PackedProduct>> items;
  std::int64_t length = 0;   // of items, until `threads` of them are full
  std::int64_t in_item = 0;  // rows that the item begun last still takes, in the next product too
  int same = 0;              // items to come that are as long
  for (const PackedProduct& product : products) {
    for (std::int64_t begin = 0; begin < RowsOf(product);) {
      if (in_item == 0) {
        if (same == 0) {
          length = std::max(kFewest, left * 3 / (std::int64_t{4} * threads));
          same = threads;
        }
        in_item = length;
        --same;
      }
      const std::int64_t rows = std::min(in_item, RowsOf(product) - begin);
      items.push_back({&product, begin, begin + rows});
      begin += rows;
      in_item -= rows;
      left -= rows;
    }
  }
  return items;
}

// wide = columns [begin, end) of rows of a product, `stride` floats apart.
void Widen(const RowSource& source, std::int64_t row, std::int64_t rows, std::int64_t begin,
           std::int64_t end, float* wide, std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    source.read(source.matrix, source.row_begin + row + r, begin, end, wide + r * stride);
  }
}

// target [rows, n] = source, whose rows are so many floats apart.
void CopyRows(const float* source, std::int64_t source_stride, std::int64_t rows, std::int64_t n,
              float* target, std::int64_t target_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(source + r * source_stride, n, target + r * target_stride);
  }
}

}  // namespace

void Multiply(const Context& context, std::span<const WideProduct> products, const float* x,
              std::int64_t x_stride, std::int64_t tokens) {
  constexpr std::int64_t kPanels = 3;  // of an item: a block of tokens is read once for all of them
  constexpr std::int64_t kTokenBlock = 48;  // whose tiles stay in L2
  const KernelTable& table = TableFor(context);
  const std::int64_t panel_rows = table.panel_rows();
  const std::int64_t panel_floats = panel_rows * kDepth;
  const std::int64_t workspace = panel_floats * (1 + kPanels);
  const TrackedBuffer buffer(static_cast<std::size_t>(workspace * Threads(context)) * sizeof(float),
                             Purpose::kWorkspace, context.memory);
  const auto items = CutRows(products, panel_rows * kPanels);

  ForEach(context, static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int thread) {
    const auto& [product, first, last] = items[static_cast<std::size_t>(index)];
    const RowSource& source = product->rows;
    float* const wide = reinterpret_cast<float*>(buffer.data()) + workspace * thread;
    float* const panels = wide + panel_floats;
    for (std::int64_t begin = 0; begin < source.columns; begin += kDepth) {
      const std::int64_t end = std::min(source.columns, begin + kDepth);
      const int depth = static_cast<int>(end - begin);
      for (std::int64_t row = first; row < last; row += panel_rows) {
        const std::int64_t count = std::min(panel_rows, last - row);
        Widen(source, row, count, begin, end, wide, kDepth);
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
                                .c = product->out + token * product->out_stride + row,
                                .c_stride = product->out_stride,
                                .add = begin > 0});
        }
      }
    }
  });
}

bool MultipliesInBf16(const Context& context) { return TableFor(context).multiplier != nullptr; }

void MultiplyInBf16(const Context& context, std::span<const WideProduct> products, const float* x,
                    std::int64_t x_stride, std::int64_t tokens, Bf16Terms terms) {
  if (products.empty() || tokens == 0) return;
  using Bits = std::uint16_t;
  constexpr std::int64_t kSide = bf16::kSide;
  constexpr std::int64_t kPanels = 4;  // of an item: a block of tokens is read once for all of them
  constexpr std::int64_t kPanelBits = kSide * kDepth;
  const KernelTable& table = TableFor(context);
  const bf16::Multiplier& multiplier = *table.multiplier;
  const std::int64_t columns = products[0].rows.columns;
  const std::int64_t steps = (columns + bf16::kDepth - 1) / bf16::kDepth;
  const std::int64_t term_bits = steps * bf16::kDepth * kSide;  // of 32 tokens
  const std::int64_t block_bits = term_bits * static_cast<int>(terms);
  const std::int64_t blocks = (tokens + kSide - 1) / kSide;
  const TrackedBuffer rounded(static_cast<std::size_t>(blocks * block_bits) * sizeof(Bits),
                              Purpose::kWorkspace, context.memory);
  Bits* const tokens_in_bf16 = reinterpret_cast<Bits*>(rounded.data());
  ForEach(context, blocks, [&](std::int64_t block, int) {
    const std::int64_t token = block * kSide;
    table.round_tokens({.x = x + token * x_stride,
                        .x_stride = x_stride,
                        .tokens = static_cast<int>(std::min(kSide, tokens - token)),
                        .columns = static_cast<int>(columns),
                        .terms = static_cast<int>(terms),
                        .target = tokens_in_bf16 + block * block_bits});
  });

  struct Workspace {
    alignas(64) float wide[kSide * kDepth];
    alignas(64) float sums[kSide * kSide];
    alignas(64) Bits scratch[kPanelBits];
    alignas(64) Bits panels[kPanels * kPanelBits];
  };
  const TrackedBuffer buffer(sizeof(Workspace) * static_cast<std::size_t>(Threads(context)),
                             Purpose::kWorkspace, context.memory);
  const auto items = CutRows(products, kSide * kPanels);
  ForEach(context, static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int thread) {
    const auto& [product, first, last] = items[static_cast<std::size_t>(index)];
    Workspace& w = reinterpret_cast<Workspace*>(buffer.data())[thread];
    multiplier.begin();
    for (std::int64_t begin = 0; begin < columns; begin += kDepth) {
      const std::int64_t end = std::min(columns, begin + kDepth);
      const int depth = static_cast<int>(end - begin);
      const int depth_steps = (depth + bf16::kDepth - 1) / bf16::kDepth;
      for (std::int64_t row = first; row < last; row += kSide) {
        const std::int64_t count = std::min(kSide, last - row);
        Widen(product->rows, row, count, begin, end, w.wide, kDepth);
        table.pack_tiles({.source = w.wide,
                          .stride = kDepth,
                          .rows = static_cast<int>(count),
                          .depth = depth,
                          .scratch = w.scratch,
                          .tiles = w.panels + (row - first) * kDepth});
      }
      for (std::int64_t token = 0; token < tokens; token += kSide) {
        for (std::int64_t row = first; row < last; row += kSide) {
          float* const c = product->out + token * product->out_stride + row;
          const std::int64_t token_count = std::min(kSide, tokens - token);
          const std::int64_t row_count = std::min(kSide, last - row);
          const bool whole = token_count == kSide && row_count == kSide;
          const bool add = begin > 0;
          // A product is always whole: at an edge it goes to memory of its own.
          if (!whole && add) {
            CopyRows(c, product->out_stride, token_count, row_count, w.sums, kSide);
          }
          for (int term = 0; term < static_cast<int>(terms); ++term) {
            multiplier.multiply({.a = tokens_in_bf16 + token / kSide * block_bits +
                                      term * term_bits + begin * kSide,
                                 .a_row = bf16::kDepth,
                                 .a_step = bf16::kDepth * kSide,
                                 .b = w.panels + (row - first) * kDepth,
                                 .b_column = std::int64_t{bf16::kTileSize} * depth_steps,
                                 .b_step = bf16::kTileSize,
                                 .steps = depth_steps,
                                 .c = whole ? c : w.sums,
                                 .c_row = whole ? product->out_stride : kSide,
                                 .add = add || term > 0});
          }
          if (!whole) CopyRows(w.sums, kSide, token_count, row_count, c, product->out_stride);
        }
      }
    }
    multiplier.end();
  });
}

bool MultipliesInI16(const Context& context) { return TableFor(context).i16 != nullptr; }

void MultiplyInI16(const Context& context, std::span<const WideProduct> products, const float* x,
                   std::int64_t x_stride, std::int64_t tokens) {
  if (products.empty() || tokens == 0) return;
  constexpr std::int64_t kRows = kI16PanelRows;
  constexpr std::int64_t kPanels = 3;  // of an item: a block of tokens is read once for all of them
  constexpr std::int64_t kTileDepth = 256;  // that of a panel fills half of L1
  constexpr std::int64_t kUnits = kTileDepth / kI16Unit;
  const I16Kernels& kernels = *TableFor(context).i16;
  const std::int64_t columns = products[0].rows.columns;
  const std::int64_t units = (columns + kI16Unit - 1) / kI16Unit;
  const std::int64_t blocks = (tokens + kI16Tokens - 1) / kI16Tokens;
  const std::int64_t block_numbers = units * kI16Tokens * kI16Unit;
  const std::int64_t block_scales = units * kI16Tokens;
  const auto numbers_bytes =
      static_cast<std::size_t>(blocks * block_numbers) * sizeof(std::int16_t);
  const auto scales_bytes = static_cast<std::size_t>(blocks * block_scales) * sizeof(float);
  const TrackedBuffer rounded(numbers_bytes + scales_bytes, Purpose::kWorkspace, context.memory);
  auto* const numbers = reinterpret_cast<std::int16_t*>(rounded.data());
  auto* const scales = reinterpret_cast<float*>(rounded.data() + numbers_bytes);
  ForEach(context, blocks, [&](std::int64_t block, int) {
    const std::int64_t token = block * kI16Tokens;
    kernels.round_tokens(
        {.x = x + token * x_stride,
         .x_stride = x_stride,
         .tokens = static_cast<int>(std::min<std::int64_t>(kI16Tokens, tokens - token)),
         .columns = static_cast<int>(columns),
         .target = numbers + block * block_numbers,
         .scales = scales + block * block_scales});
  });

  struct Workspace {
    alignas(64) float wide[kRows * kTileDepth];
    alignas(64) std::uint16_t scratch[kRows * kTileDepth];
    alignas(64) std::uint16_t panels[kPanels * kRows * kTileDepth];
    alignas(64) float scales[kPanels * kRows * kUnits];
  };
  const TrackedBuffer buffer(sizeof(Workspace) * static_cast<std::size_t>(Threads(context)),
                             Purpose::kWorkspace, context.memory);
  const auto items = CutRows(products, kRows * kPanels);
  ForEach(context, static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int thread) {
    const auto& [product, first, last] = items[static_cast<std::size_t>(index)];
    Workspace& w = reinterpret_cast<Workspace*>(buffer.data())[thread];
    for (std::int64_t begin = 0; begin < columns; begin += kTileDepth) {
      const std::int64_t end = std::min(columns, begin + kTileDepth);
      const int depth = static_cast<int>(end - begin);
      for (std::int64_t row = first; row < last; row += kRows) {
        const std::int64_t count = std::min(kRows, last - row);
        Widen(product->rows, row, count, begin, end, w.wide, kTileDepth);
        kernels.pack_panel({.source = w.wide,
                            .stride = kTileDepth,
                            .rows = static_cast<int>(count),
                            .depth = depth,
                            .scratch = w.scratch,
                            .tiles = w.panels + (row - first) * kTileDepth,
                            .scales = w.scales + (row - first) * kUnits});
      }
      for (std::int64_t block = 0; block < blocks; ++block) {
        const std::int64_t token = block * kI16Tokens;
        const std::int64_t unit = begin / kI16Unit * kI16Tokens;
        for (std::int64_t row = first; row < last; row += kRows) {
          kernels.multiply_panel(
              {.tokens_in_i16 = numbers + block * block_numbers + unit * kI16Unit,
               .token_scales = scales + block * block_scales + unit,
               .tiles = w.panels + (row - first) * kTileDepth,
               .scales = w.scales + (row - first) * kUnits,
               .tokens = static_cast<int>(std::min<std::int64_t>(kI16Tokens, tokens - token)),
               .rows = static_cast<int>(std::min(kRows, last - row)),
               .steps = (depth + kI16Unit - 1) / kI16Unit,
               .c = product->out + token * product->out_stride + row,
               .c_stride = product->out_stride,
               .add = begin > 0});
        }
      }
    }
  });
}

void MultiplyFew(const Context& context, std::span<const PackedProduct> products, const float* x,
                 std::int64_t columns, std::int64_t tokens) {
  const KernelTable& table = TableFor(context);
  const std::int64_t blocks = columns / kFineBlock;
  // Values first: a block of them is a cache line.
  const auto value_bytes = static_cast<std::size_t>(columns) * sizeof(std::int16_t);
  const std::size_t token_bytes =
      (value_bytes + static_cast<std::size_t>(2 * blocks) * sizeof(float) + 63) / 64 * 64;
  const TrackedBuffer buffer(token_bytes * static_cast<std::size_t>(tokens), Purpose::kWorkspace,
                             context.memory);
  std::vector<FineRow> fine;
  fine.reserve(static_cast<std::size_t>(tokens));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::byte* place = buffer.data() + token_bytes * static_cast<std::size_t>(t);
    auto* scales = reinterpret_cast<float*>(place + value_bytes);
    fine.push_back({.values = reinterpret_cast<std::int16_t*>(place),
                    .scales = scales,
                    .sums = scales + blocks});
    table.refine_row(x + t * columns, static_cast<int>(columns), fine.back());
  }
  const auto items = CutRowsShorter(products, Threads(context));
  ForEach(context, static_cast<std::int64_t>(items.size()), [&](std::int64_t index, int) {
    const auto& [product, first, last] = items[static_cast<std::size_t>(index)];
    const PackedRows& source = product->rows;
    table.dot_rows(
        {.format = source.format,
         .weights = source.data + static_cast<std::size_t>(source.begin + first) * source.row_bytes,
         .row_bytes = source.row_bytes,
         .rows = static_cast<int>(last - first),
         .columns = static_cast<int>(columns),
         .x = fine.data(),
         .tokens = static_cast<int>(tokens),
         .out = product->out + first,
         .out_stride = product->out_stride});
  });
}

}  // namespace treeline::cpu
