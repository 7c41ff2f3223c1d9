// Products of many tokens with a matrix of weights, panel by panel.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm/panels.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kPanelVectors = 2;
constexpr int kPanelRows = std::max(kPanelVectors * kLanes, 4);
constexpr int kVectors = kPanelRows / kLanes;
// Sums, one panel row and one broadcast fill the registers.
constexpr int kTokens = kManyRegisters ? 8 : kVectors > 2 ? 2 : 6;

template <int kCount>
HWY_INLINE void MultiplyTokens(const PanelArgs& args, int token, float* tile) {
  Multiply<kCount, kVectors, false>(
      args.a + token * args.a_stride, static_cast<std::size_t>(args.a_stride), 1, args.panel,
      kPanelRows, static_cast<std::size_t>(args.depth), tile, kPanelRows);
}

}  // namespace

int PanelRows() noexcept { return kPanelRows; }

void PackPanel(const PackArgs& args) noexcept {
  for (int row = 0; row < kPanelRows; row += 4) {
    if (row + 4 <= args.rows) {
      TransposeFourRows(args.source + row * args.stride, static_cast<std::size_t>(args.stride),
                        args.depth, 1.0f, args.panel + row, kPanelRows);
      continue;
    }
    for (int r = row; r < row + 4; ++r) {
      for (int i = 0; i < args.depth; ++i) {
        args.panel[i * kPanelRows + r] = r < args.rows ? args.source[r * args.stride + i] : 0.0f;
      }
    }
  }
}

void MultiplyPanel(const PanelArgs& args) noexcept {
  HWY_ALIGN float tile[kTokens * kPanelRows];
  for (int token = 0; token < args.tokens; token += kTokens) {
    const int count = std::min(kTokens, args.tokens - token);
    if (count == kTokens) {
      MultiplyTokens<kTokens>(args, token, tile);
    } else {
      // One by one, which gives the same bits.
      for (int t = 0; t < count; ++t) MultiplyTokens<1>(args, token + t, tile + t * kPanelRows);
    }
    for (int t = 0; t < count; ++t) {
      float* c = args.c + (token + t) * args.c_stride;
      const float* sums = tile + t * kPanelRows;
      if (args.add) {
        for (int r = 0; r < args.rows; ++r) c[r] += sums[r];
      } else {
        std::copy_n(sums, args.rows, c);
      }
    }
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
