// What a transformer does with one row of activations besides multiplying it.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rowwise.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <cmath>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

void RmsNorm(const float* HWY_RESTRICT x, const float* HWY_RESTRICT weight, int n, float epsilon,
             float* HWY_RESTRICT out) noexcept {
  const DF d;
  VF sums = hn::Zero(d);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VF v = hn::LoadU(d, x + i);
    sums = hn::MulAdd(v, v, sums);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, sums));
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + epsilon);
  const VF scales = hn::Set(d, scale);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), scales), hn::LoadU(d, weight + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void Rotate(const RotateArgs& args) noexcept {
  for (int head = 0; head < args.heads; ++head) {
    float* x = args.x + static_cast<std::ptrdiff_t>(head) * args.head_dim;
    for (int i = 0; i < args.pairs; ++i) {
      const float even = x[2 * i];
      const float odd = x[2 * i + 1];
      x[2 * i] = even * args.cosines[i] - odd * args.sines[i];
      x[2 * i + 1] = even * args.sines[i] + odd * args.cosines[i];
    }
  }
}

void SwiGlu(float* HWY_RESTRICT gate, const float* HWY_RESTRICT up, int n) noexcept {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  // By exp(-|x|), which cannot overflow: the logistic function is 1 / (1 + e), or e / (1 + e).
  const auto apply = [&](VF x, VF u) HWY_ATTR {
    const VF e = Exp2(hn::Mul(hn::Abs(x), hn::Set(d, -kLog2E)));
    const VF numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
    return hn::Mul(hn::Mul(x, u), hn::Div(numerator, hn::Add(one, e)));
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(apply(hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, gate + i);
  }
  for (; i < n; ++i) {
    gate[i] = hn::GetLane(apply(hn::Set(d, gate[i]), hn::Set(d, up[i])));
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
