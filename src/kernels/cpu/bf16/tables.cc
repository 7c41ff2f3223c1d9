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

// `most_terms` is what the table says.
bool IsForwardInBf16(const AttentionSpec& spec, const AttendTask& task, int most_terms) {
  return IsBf16(task) || (spec.bf16_terms > 0 && spec.bf16_terms <= most_terms);
}

template <int kMostTerms>
ForwardBlock ChooseForwardBlock(const AttentionSpec& spec, const AttendTask& task) noexcept {
  return IsForwardInBf16(spec, task, kMostTerms) ? BlockOfBf16Forward(spec, task)
                                                 : BlockOfForward(spec, task);
}

BackwardBlock ChooseBackwardBlock(const AttentionSpec& spec, const BackwardTask& task) noexcept {
  return IsBf16(task) ? BlockOfBf16Backward(spec, task) : BlockOfBackward(spec, task);
}

// `kMultiplier` says how to multiply; it never returns null where the table is used.
template <const bf16::Multiplier* (*kMultiplier)(), int kMostTerms>
void ForwardWith(const ForwardArgs& args) noexcept {
  if (IsForwardInBf16(*args.spec, *args.task, kMostTerms)) {
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

template <const bf16::Multiplier* (*kMultiplier)(), int kMostTerms>
KernelTable With(KernelTable table, Isa isa) {
  table.isa = isa;
  table.multiplier = kMultiplier();
  table.bf16_terms = kMostTerms;
  table.round_tokens = RoundTokens;
  table.pack_tiles = PackTiles;
  table.forward_block = ChooseForwardBlock<kMostTerms>;
  table.forward = ForwardWith<kMultiplier, kMostTerms>;
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
  // What machines without VNNI have, beside what is made for tests.
  KernelTable plain = WithBytes<PlainBytes>(With<Plain, 2>(avx512, Isa::kPlainBf16));
  plain.i16 = nullptr;
  plain.dot_rows = DotRows;
  before_avx512(plain);
  if (bf16::DotMultiplier() != nullptr) {
    // With two terms products in bf16 take as long as those in f32.
    const KernelTable table = With<bf16::DotMultiplier, 1>(avx512, Isa::kAvx512Bf16);
    // Other makers' dot products in bf16 are no faster than products in f32, and less exact.
    if (__builtin_cpu_is("amd") != 0) {
      tables.push_back(table);
    } else {
      before_avx512(table);
    }
  }
  if (bf16::AmxMultiplier() != nullptr) {
    KernelTable amx =
        WithBytes<int8::AmxMultiplier>(With<bf16::AmxMultiplier, 2>(avx512, Isa::kAmx));
    amx.i16 = nullptr;
    tables.push_back(amx);
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
