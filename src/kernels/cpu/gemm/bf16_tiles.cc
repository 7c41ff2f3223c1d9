// Both sides of a product of many tokens with a matrix of weights, in bf16 and in the order in
// which product.h wants them.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm/bf16_tiles.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/bf16/kernels-inl.h"
#include "kernels/cpu/bf16/pack-inl.h"
#include "treeline/dtype.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

void RoundTokens(const RoundTokensArgs& args) noexcept {
  const std::int64_t term = std::int64_t{RoundUp(args.columns, kDepth)} * kSide;
  // Rows of a step lie together: those of a matrix are often so far apart that all of a step would
  // fall into one set of the first-level cache.
  for (int t = 0; t < kSide; ++t) {
    for (int i = 0; i < args.columns; i += kDepth) {
      Bits* target = args.target + std::int64_t{i} * kSide + t * kDepth;
      const int n = t < args.tokens ? std::min(kDepth, args.columns - i) : 0;
      if (n == 0) {
        std::memset(target, 0, sizeof(Bits) * kDepth);
        if (args.terms == 2) std::memset(target + term, 0, sizeof(Bits) * kDepth);
      } else if (args.terms == 2) {
        SplitRow(args.x + t * args.x_stride + i, n, target, target + term);
      } else {
        RoundRow(args.x + t * args.x_stride + i, n, target);
      }
    }
  }
}

void PackTiles(const PackTilesArgs& args) noexcept {
  const int padded = RoundUp(args.depth, kDepth);
  const Bits* rows[kSide];
  for (int r = 0; r < kSide; ++r) {
    Bits* rounded = args.scratch + r * padded;
    rows[r] = rounded;
    if (r < args.rows) {
      RoundRow(args.source + r * args.stride, args.depth, rounded);
    } else {
      std::memset(rounded, 0, sizeof(Bits) * padded);
    }
  }
  PackColumns(rows, padded, args.tiles);
  PackColumns(rows + kTileRows, padded, args.tiles + kTileRows * padded);
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
