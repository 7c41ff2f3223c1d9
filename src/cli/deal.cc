#include "cli/deal.h"

#include <cstring>

#include "core/check.h"

namespace treeline::cli {
namespace {

// Copies rows [slot, head] and returns the end of the copy.
template <class RowAt>
std::byte* CopyRows(const Positions& slots, int heads, std::size_t row_bytes, const RowAt& row_at,
                    std::byte* target) {
  for (std::int64_t i = 0; i < slots.count(); ++i) {
    for (int head = 0; head < heads; ++head) {
      std::memcpy(target, row_at(slots[i], head), row_bytes);
      target += row_bytes;
    }
  }
  return target;
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

std::size_t KeyBytes(const KvView& whole, std::int64_t slots) {
  return static_cast<std::size_t>(slots * whole.kv_heads) *
         (RowBytes(whole.dtype, whole.k.dim) + RowBytes(whole.dtype, whole.v.dim));
}

KvView CopyKeys(const KvView& whole, const Positions& slots, std::byte* target) {
  const TensorView k =
      TensorView::Dense(target, whole.dtype, slots.count(), whole.kv_heads, whole.k.dim);
  target = CopyRows(
      slots, whole.kv_heads, RowBytes(whole.dtype, whole.k.dim),
      [&](std::int64_t slot, int head) { return whole.KeyRow(slot, head); }, target);
  const TensorView v =
      TensorView::Dense(target, whole.dtype, slots.count(), whole.kv_heads, whole.v.dim);
  CopyRows(
      slots, whole.kv_heads, RowBytes(whole.dtype, whole.v.dim),
      [&](std::int64_t slot, int head) { return whole.ValueRow(slot, head); }, target);
  return KvView::Strided(k, v);
}

DealtKeys DealKeys(const KvView& whole, const Positions& slots) {
  DealtKeys dealt;
  dealt.bytes.resize(KeyBytes(whole, slots.count()));
  dealt.view = CopyKeys(whole, slots, dealt.bytes.data());
  return dealt;
}

DealtRows DealRows(const TensorView& whole, const Positions& slots) {
  DealtRows dealt;
  const std::size_t row = RowBytes(whole.dtype, whole.dim);
  dealt.bytes.resize(static_cast<std::size_t>(slots.count() * whole.heads) * row);
  CopyRows(
      slots, whole.heads, row, [&](std::int64_t token, int head) { return whole.Row(token, head); },
      dealt.bytes.data());
  dealt.view =
      TensorView::Dense(dealt.bytes.data(), whole.dtype, slots.count(), whole.heads, whole.dim);
  return dealt;
}

}  // namespace treeline::cli
