#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/kernel_table.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "kernels/cpu/bf16/kernels-inl.h"
#include "kernels/cpu/kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

KernelTable MakeTable(Isa isa) {
  return {.isa = isa,
          .multiplier = nullptr,
          .round_tokens = nullptr,
          .pack_tiles = nullptr,
          .bf16_terms = 0,
          .forward_block = BlockOfForward,
          .forward = Forward,
          .decode_workspace = DecodeWorkspace,
          .decode = Decode,
          .rounds_queries = RoundsQueries(),
          .backward_block = BlockOfBackward,
          .backward = Backward,
          .merge = MergeRows,
          .panel_rows = PanelRows,
          .pack_panel = PackPanel,
          .multiply_panel = MultiplyPanel,
          .i16 = FindI16Kernels(),
          .refine_row = RefineRow,
          .dot_rows = FindDotRows(),
          .rms_norm = RmsNorm,
          .rotate = Rotate,
          .swiglu = SwiGlu,
          .read_probe = ReadProbe,
          .fma_probe = FmaProbe};
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>
#include <cstdlib>
#include <string>

#include "core/check.h"

namespace treeline {
namespace {

// The tables that this build has and this CPU can run, best last.
std::vector<cpu::KernelTable> MakeTables() {
  [[maybe_unused]] const auto supported = hwy::SupportedTargets();
  std::vector<cpu::KernelTable> tables;
#if HWY_TARGETS & HWY_SCALAR
  tables.push_back(cpu::N_SCALAR::MakeTable(Isa::kScalar));
#elif HWY_TARGETS & HWY_EMU128
  tables.push_back(cpu::N_EMU128::MakeTable(Isa::kScalar));
#endif
#if HWY_TARGETS & HWY_NEON
  if ((supported & HWY_NEON) != 0) tables.push_back(cpu::N_NEON::MakeTable(Isa::kNeon));
#endif
#if HWY_TARGETS & HWY_SSE4
  if ((supported & HWY_SSE4) != 0) tables.push_back(cpu::N_SSE4::MakeTable(Isa::kSse4));
#endif
#if HWY_TARGETS & HWY_AVX2
  if ((supported & HWY_AVX2) != 0) tables.push_back(cpu::N_AVX2::MakeTable(Isa::kAvx2));
#endif
#if HWY_TARGETS & HWY_AVX3
  if ((supported & HWY_AVX3) != 0) {
    tables.push_back(cpu::N_AVX3::MakeTable(Isa::kAvx512));
    cpu::N_AVX3::AddBf16Tables(tables);
  }
#endif
  return tables;
}

const std::vector<cpu::KernelTable>& Tables() {
  static const std::vector<cpu::KernelTable> tables = MakeTables();
  return tables;
}

}  // namespace

std::string_view Name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kSse4:
      return "sse4";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx512Bf16:
      return "avx512-bf16";
    case Isa::kAmx:
      return "amx";
    case Isa::kPlainBf16:
      return "plain-bf16";
  }
  Throw<ArgumentError>("instruction set ", static_cast<int>(isa), " has no name");
}

bool ComputesInBf16(Isa isa) {
  return isa == Isa::kAvx512Bf16 || isa == Isa::kAmx || isa == Isa::kPlainBf16;
}

const std::vector<Isa>& AttainableIsas() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> all = cpu::TestedIsas();
    std::erase(all, Isa::kPlainBf16);
    return all;
  }();
  return isas;
}

Isa ParseIsa(std::string_view name) {
  for (Isa isa : cpu::TestedIsas()) {
    if (name == Name(isa)) return isa;
  }
  std::string available;
  for (Isa isa : AttainableIsas()) {
    available.append(available.empty() ? "" : ", ").append(Name(isa));
  }
  const char* why = name == Name(Isa::kAmx) ? cpu::bf16::WhyNoAmx() : nullptr;
  Throw<ArgumentError>("instruction set '", name, "' is not available", why == nullptr ? "" : ": ",
                       why == nullptr ? "" : why, "; this CPU and build have ", available);
}

Isa DefaultIsa() {
  const char* forced = std::getenv("TREELINE_ISA");
  if (forced == nullptr || *forced == '\0') return AttainableIsas().back();
  try {
    return ParseIsa(forced);
  } catch (const ArgumentError& error) {
    Throw<ArgumentError>("TREELINE_ISA: ", error.what());
  }
}

namespace cpu {

std::vector<Isa> TestedIsas() {
  std::vector<Isa> isas;
  for (const KernelTable& table : Tables()) isas.push_back(table.isa);
  return isas;
}

const KernelTable& TableFor(Isa isa) {
  for (const KernelTable& table : Tables()) {
    if (table.isa == isa) return table;
  }
  ParseIsa(Name(isa));  // throws, listing what there is
  std::abort();
}

const KernelTable& TableFor(const Context& context) {
  return TableFor(context.isa ? *context.isa : DefaultIsa());
}

}  // namespace cpu
}  // namespace treeline

#endif  // HWY_ONCE
