#include "cli/deal.h"

#include <cstring>

#include "core/check.h"

namespace treeline::cli {
namespace {

template <class RowAt>
std::vector<std::byte> CopyRows(const Positions& slots, int heads, std::size_t row_bytes,
                                const RowAt& row_at) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(slots.count() * heads) * row_bytes);
  std::byte* target = bytes.data();
  for (std::int64_t i = 0; i < slots.count(); ++i) {
    for (int head = 0; head < heads; ++head) {
      std::memcpy(target, row_at(slots[i], head), row_bytes);
      target += row_bytes;
    }
  }
  return bytes;
}

}  // namespace

Layout MakeLayout(LayoutKind kind, std::int64_t tokens, int ranks) {
  switch (kind) {
    case LayoutKind::kContiguous:
      return Layout::Contiguous(tokens, ranks);
    case LayoutKind::kZigzag:
      return Layout::Zigzag(tokens, ranks);
    case LayoutKind::kStriped:
      break;
  }
  return Layout::Striped(tokens, ranks);
}

LayoutKind ParseLayout(std::string_view name) {
  for (const LayoutKind kind :
       {LayoutKind::kContiguous, LayoutKind::kStriped, LayoutKind::kZigzag}) {
    if (name == Name(kind)) return kind;
  }
  Throw<ArgumentError>("layout is \"", name, "\"; it must be contiguous, striped or zigzag");
}

bool IsWholeSequence(const Positions& positions) {
  return positions.count() == 0 || positions[positions.count() - 1] == positions.count() - 1;
}

DealtKeys DealKeys(const KvView& whole, const Positions& slots) {
  DealtKeys dealt;
  dealt.k = CopyRows(slots, whole.kv_heads, RowBytes(whole.dtype, whole.k.dim),
                     [&](std::int64_t slot, int head) { return whole.KeyRow(slot, head); });
  dealt.v = CopyRows(slots, whole.kv_heads, RowBytes(whole.dtype, whole.v.dim),
                     [&](std::int64_t slot, int head) { return whole.ValueRow(slot, head); });
  dealt.view = KvView::Strided(
      TensorView::Dense(dealt.k.data(), whole.dtype, slots.count(), whole.kv_heads, whole.k.dim),
      TensorView::Dense(dealt.v.data(), whole.dtype, slots.count(), whole.kv_heads, whole.v.dim));
  return dealt;
}

DealtRows DealRows(const TensorView& whole, const Positions& slots) {
  DealtRows dealt;
  dealt.bytes = CopyRows(slots, whole.heads, RowBytes(whole.dtype, whole.dim),
                         [&](std::int64_t token, int head) { return whole.Row(token, head); });
  dealt.view =
      TensorView::Dense(dealt.bytes.data(), whole.dtype, slots.count(), whole.heads, whole.dim);
  return dealt;
}

}  // namespace treeline::cli
