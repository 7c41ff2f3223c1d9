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
      float x[kDepth] = {};
      if (t < args.tokens) {
        std::copy_n(args.x + t * args.x_stride + i, std::min(kDepth, args.columns - i), x);
      }
      RoundRow(x, kDepth, target);
      if (args.terms == 1) continue;
      for (int j = 0; j < kDepth; ++j) {
        // An infinity has nothing left; a NaN is one in both terms.
        const float rounded = F32FromBF16(target[j]);
        x[j] = std::isinf(rounded) ? 0.0f : x[j] - rounded;
      }
      RoundRow(x, kDepth, target + term);
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
