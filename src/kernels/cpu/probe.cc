// What the machine can do at most: reading memory, and multiplying and adding in registers.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/probe.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

std::uint64_t ReadProbe(const ProbeArgs& args) noexcept {
  // Four streams a thread reach what one cannot: each keeps its own prefetcher busy.
  constexpr std::size_t kStreams = 4;
  constexpr std::size_t kStep = 256;
  const hn::ScalableTag<std::uint64_t> d;
  constexpr std::size_t kVector = hn::MaxLanes(d) * sizeof(std::uint64_t);
  const std::size_t stream = args.bytes / kStreams / kStep * kStep;
  auto mix0 = hn::Zero(d);
  auto mix1 = hn::Zero(d);
  for (std::size_t i = 0; i < stream; i += kStep) {
    for (std::size_t s = 0; s < kStreams; ++s) {
      const auto* p = reinterpret_cast<const std::uint64_t*>(args.data + s * stream + i);
      for (std::size_t j = 0; j < kStep; j += 2 * kVector) {
        mix0 = hn::Xor(mix0, hn::LoadU(d, p + j / sizeof(std::uint64_t)));
        mix1 = hn::Xor(mix1, hn::LoadU(d, p + (j + kVector) / sizeof(std::uint64_t)));
      }
    }
  }
  // Not SumOfLanes: that of gcc for AVX-512 adds as signed numbers, which may not overflow.
  std::uint64_t lanes[hn::MaxLanes(d)];
  hn::StoreU(hn::Xor(mix0, mix1), d, lanes);
  std::uint64_t all = 0;
  for (const std::uint64_t lane : lanes) all ^= lane;
  return all;
}

double FmaProbe(const ProbeArgs& args) noexcept {
  constexpr int kChains = 12;  // covers a latency of 6 cycles at two a cycle
  const DF d;
  VF sum[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sum[i] = hn::Set(d, static_cast<float>(i));
  const VF half = hn::Set(d, 0.5f);
  const VF one = hn::Set(d, 1.0f);
  for (std::size_t n = 0; n < args.iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sum[i] = hn::MulAdd(sum[i], half, one);
  }
  VF all = sum[0];
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) all = hn::Add(all, sum[i]);
  // The result depends on every chain, so that none can be left out.
  if (hn::GetLane(hn::SumOfLanes(d, all)) < 0.0f) return 0.0;
  return 2.0 * kChains * kLanes * static_cast<double>(args.iterations);
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
