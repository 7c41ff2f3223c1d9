// Tables of machines that multiply in bf16: what AVX-512 has, with forward and backward attention
// in bf16 where queries, keys and values are, or may be rounded to it.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/bf16/tables.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "kernels/cpu/bf16/kernels-inl.h"
#include "kernels/cpu/kernels-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

template <class Task>
bool IsBf16(const Task& task) {
  return task.q.dtype == DType::kBF16 && task.kv.dtype == DType::kBF16;
}

bool IsForwardInBf16(const AttentionSpec& spec, const AttendTask& task) {
  return spec.bf16_terms > 0 || IsBf16(task);
}

ForwardBlock ChooseForwardBlock(const AttentionSpec& spec, const AttendTask& task) noexcept {
  return IsForwardInBf16(spec, task) ? BlockOfBf16Forward(spec, task) : BlockOfForward(spec, task);
}

BackwardBlock ChooseBackwardBlock(const AttentionSpec& spec, const BackwardTask& task) noexcept {
  return IsBf16(task) ? BlockOfBf16Backward(spec, task) : BlockOfBackward(spec, task);
}

// `kMultiplier` says how to multiply; it never returns null where the table is used.
template <const bf16::Multiplier* (*kMultiplier)()>
void ForwardWith(const ForwardArgs& args) noexcept {
  if (IsForwardInBf16(*args.spec, *args.task)) {
    Bf16Forward(args, *kMultiplier());
  } else {
    Forward(args);
  }
}

template <const bf16::Multiplier* (*kMultiplier)()>
void BackwardWith(const BackwardArgs& args) noexcept {
  if (IsBf16(*args.task)) {
    Bf16Backward(args, *kMultiplier());
  } else {
    Backward(args);
  }
}

template <const int8::Multiplier* (*kMultiplier)()>
void DecodeInBytesWith(const DecodeArgs& args) noexcept {
  DecodeWith(args, kMultiplier());
}

const bf16::Multiplier* Plain() { return &bf16::PlainMultiplier(); }
const int8::Multiplier* PlainBytes() { return &int8::PlainMultiplier(); }

// Where `kMultiplier` is not null, queries that may be rounded are multiplied by it.
template <const int8::Multiplier* (*kMultiplier)()>
KernelTable WithBytes(KernelTable table) {
  if (kMultiplier() == nullptr) return table;
  table.decode = DecodeInBytesWith<kMultiplier>;
  table.rounds_queries = true;
  return table;
}

template <const bf16::Multiplier* (*kMultiplier)()>
KernelTable With(KernelTable table, Isa isa) {
  table.isa = isa;
  if (isa != Isa::kAvx512Bf16) table.i16 = nullptr;
  table.multiplier = kMultiplier();
  table.round_tokens = RoundTokens;
  table.pack_tiles = PackTiles;
  table.forward_block = ChooseForwardBlock;
  table.forward = ForwardWith<kMultiplier>;
  table.backward_block = ChooseBackwardBlock;
  table.backward = BackwardWith<kMultiplier>;
  return table;
}

}  // namespace

void AddBf16Tables(std::vector<KernelTable>& tables) {
  const KernelTable avx512 = tables.back();
  const auto before_avx512 = [&](const KernelTable& table) {
    tables.insert(tables.end() - 1, table);
  };
  if (bf16::DotMultiplier() != nullptr) {
    const KernelTable table = With<bf16::DotMultiplier>(avx512, Isa::kAvx512Bf16);
    // Other makers' dot products in bf16 are no faster than products in f32, and less exact.
    if (__builtin_cpu_is("amd") != 0) {
      tables.push_back(table);
    } else {
      before_avx512(table);
    }
  }
  if (bf16::AmxMultiplier() != nullptr) {
    tables.push_back(WithBytes<int8::AmxMultiplier>(With<bf16::AmxMultiplier>(avx512, Isa::kAmx)));
  } else if (bf16::DotMultiplier() == nullptr) {
    before_avx512(WithBytes<PlainBytes>(With<Plain>(avx512, Isa::kPlainBf16)));
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
