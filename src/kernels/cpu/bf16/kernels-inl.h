// The kernels of this folder; see kernel_table.h for their contracts. Queries, keys and values are
// bf16. AVX-512 only: the machines that have products in bf16 have it. Included once per target.

#if defined(TREELINE_KERNELS_CPU_BF16_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_BF16_KERNELS_INL_H_
#undef TREELINE_KERNELS_CPU_BF16_KERNELS_INL_H_
#else
#define TREELINE_KERNELS_CPU_BF16_KERNELS_INL_H_
#endif

#include <hwy/highway.h>

#include <vector>

#include "kernels/cpu/bf16/product.h"
#include "kernels/cpu/kernel_table.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

ForwardBlock BlockOfBf16Forward(const AttentionSpec& spec, const AttendTask& task) noexcept;
void Bf16Forward(const ForwardArgs& args, const bf16::Multiplier& multiplier) noexcept;

BackwardBlock BlockOfBf16Backward(const AttentionSpec& spec, const BackwardTask& task) noexcept;
void Bf16Backward(const BackwardArgs& args, const bf16::Multiplier& multiplier) noexcept;

void RoundTokens(const RoundTokensArgs& args) noexcept;
void PackTiles(const PackTilesArgs& args) noexcept;

// Adds tables of machines that multiply in bf16, as far as this is one, to `tables`, whose last is
// that of AVX-512: before it what is slower, after it what is faster. If this is none, one for
// tests.
void AddBf16Tables(std::vector<KernelTable>& tables);

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
#endif  // include guard per target
