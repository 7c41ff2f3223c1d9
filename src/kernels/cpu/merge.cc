// Merging partials row by row.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/merge.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One vector of a row: (sum of weight * part) / total. Two parts commute bitwise: each product is
// rounded before the sum, and a NaN loses its payload.
template <class D>
HWY_INLINE void MergeVector(D d, const MergeArgs& a, std::size_t offset, const float* weights,
                            float inverse) {
  auto sum = hn::Mul(hn::Set(d, weights[0]), hn::LoadU(d, a.parts[0].out.data() + offset));
  for (std::size_t i = 1; i < a.count; ++i) {
    sum =
        hn::Add(sum, hn::Mul(hn::Set(d, weights[i]), hn::LoadU(d, a.parts[i].out.data() + offset)));
  }
  const auto merged = hn::Mul(sum, hn::Set(d, inverse));
  hn::StoreU(hn::IfThenElse(hn::IsNaN(merged), hn::Set(d, kNaN), merged), d,
             a.target->out.data() + offset);
}

}  // namespace

void MergeRows(const MergeArgs& a) noexcept {
  const auto dim = static_cast<std::size_t>(a.target->v_head_dim);
  for (std::size_t row = a.row_begin; row < a.row_end; ++row) {
    float* out = a.target->out.data() + row * dim;
    float highest = kMinusInfinity;
    bool all_empty = true;  // a NaN must not be taken for empty
    for (std::size_t i = 0; i < a.count; ++i) {
      highest = std::max(highest, a.parts[i].lse[row]);
      all_empty = all_empty && a.parts[i].lse[row] == kMinusInfinity;
    }
    if (all_empty) {
      std::fill_n(out, dim, 0.0f);
      a.target->lse[row] = kMinusInfinity;
      continue;
    }
    float weights[kMaxMergeParts];
    float total = 0.0f;
    for (std::size_t i = 0; i < a.count; ++i) {
      weights[i] = std::exp(a.parts[i].lse[row] - highest);
      total += weights[i];
    }
    const float inverse = 1.0f / total;
    const float lse = highest + std::log(total);
    std::size_t column = 0;
    for (; column + kLanes <= dim; column += kLanes) {
      MergeVector(DF(), a, row * dim + column, weights, inverse);
    }
    for (; column < dim; column += 8) {
      MergeVector(hn::CappedTag<float, 8>(), a, row * dim + column, weights, inverse);
    }
    a.target->lse[row] = std::isnan(lse) ? kNaN : lse;
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
