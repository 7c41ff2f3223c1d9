// The kernels that every Highway target provides; see kernel_table.h for their contracts.
// Included once per target.

#if defined(TREELINE_KERNELS_CPU_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_KERNELS_INL_H_
#undef TREELINE_KERNELS_CPU_KERNELS_INL_H_
#else
#define TREELINE_KERNELS_CPU_KERNELS_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/cpu/int8/product.h"
#include "kernels/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

ForwardBlock BlockOfForward(const AttentionSpec& spec, const AttendTask& task) noexcept;
void Forward(const ForwardArgs& args) noexcept;
std::size_t DecodeWorkspace(const AttentionSpec& spec, const DecodeShape& shape) noexcept;
void Decode(const DecodeArgs& args) noexcept;
// With these products of bytes where queries may be rounded; without any, nothing is rounded.
void DecodeWith(const DecodeArgs& args, const int8::Multiplier* bytes) noexcept;
bool RoundsQueries() noexcept;
BackwardBlock BlockOfBackward(const AttentionSpec& spec, const BackwardTask& task) noexcept;
void Backward(const BackwardArgs& args) noexcept;
void MergeRows(const MergeArgs& args) noexcept;
int PanelRows() noexcept;
void PackPanel(const PackArgs& args) noexcept;
void MultiplyPanel(const PanelArgs& args) noexcept;
const I16Kernels* FindI16Kernels() noexcept;
void RefineRow(const float* x, int columns, const FineRow& target) noexcept;
void DotRows(const DotRowsArgs& args) noexcept;
// The fastest that the CPU has.
using DotRowsFunction = void(const DotRowsArgs& args) noexcept;
DotRowsFunction* FindDotRows() noexcept;
void RmsNorm(const float* x, const float* weight, int n, float epsilon, float* out) noexcept;
void Rotate(const RotateArgs& args) noexcept;
void SwiGlu(float* gate, const float* up, int n) noexcept;
std::uint64_t ReadProbe(const ProbeArgs& args) noexcept;
double FmaProbe(const ProbeArgs& args) noexcept;

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
