#include "cli/deal.h"

#include <cstring>

#include "cli/problem.h"
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

// Copies rows to pages [head, slot], the first page last, appends the addresses of the pages and
// returns the end of the copy.
template <class RowAt>
std::byte* CopyPages(const Positions& slots, int heads, std::size_t row_bytes,
                     std::int64_t page_slots, const RowAt& row_at, std::byte* target,
                     std::vector<const void*>& pages) {
  const std::int64_t count = (slots.count() + page_slots - 1) / page_slots;
  const std::size_t page_bytes = static_cast<std::size_t>(page_slots * heads) * row_bytes;
  std::byte* const end = target + static_cast<std::size_t>(count) * page_bytes;
  for (std::int64_t slot = 0; slot < slots.count(); ++slot) {
    const std::int64_t page = slot / page_slots;
    std::byte* start = end - static_cast<std::size_t>(page + 1) * page_bytes;
    if (slot % page_slots == 0) pages.push_back(start);
    for (int head = 0; head < heads; ++head) {
      const auto row = static_cast<std::size_t>(head * page_slots + slot % page_slots);
      std::memcpy(start + row * row_bytes, row_at(slots[slot], head), row_bytes);
    }
  }
  return end;
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

DealtKeys DealKeys(const KvView& whole, const Positions& slots, std::int64_t page_slots) {
  DealtKeys dealt;
  if (page_slots > 0) {
    const std::int64_t pages = (slots.count() + page_slots - 1) / page_slots;
    dealt.bytes.resize(KeyBytes(whole, pages * page_slots), kPoison);
    std::byte* next = CopyPages(
        slots, whole.kv_heads, RowBytes(whole.dtype, whole.k.dim), page_slots,
        [&](std::int64_t slot, int head) { return whole.KeyRow(slot, head); }, dealt.bytes.data(),
        dealt.k_pages);
    CopyPages(
        slots, whole.kv_heads, RowBytes(whole.dtype, whole.v.dim), page_slots,
        [&](std::int64_t slot, int head) { return whole.ValueRow(slot, head); }, next,
        dealt.v_pages);
    dealt.view = KvView::Paged(dealt.k_pages, dealt.v_pages, whole.dtype, slots.count(), page_slots,
                               whole.kv_heads, whole.k.dim, whole.v.dim);
    return dealt;
  }
  dealt.bytes.resize(KeyBytes(whole, slots.count()));
  dealt.view = CopyKeys(whole, slots, dealt.bytes.data());
  return dealt;
}

Positions Tail(const Positions& shard, std::int64_t begin) {
  const std::int64_t count = shard.count() - begin;
  if (count <= 0) return {};
  // Consecutive positions from a slot on.
  const auto run_at = [&](std::int64_t slot) {
    Positions::Segment run{.first = shard[slot], .run = 1, .stride = 1, .count = 1};
    while (slot + run.count < shard.count() && shard[slot + run.count] == run.first + run.count) {
      ++run.count;
    }
    return run;
  };
  const Positions::Segment head = run_at(begin);
  if (head.count == count) return Positions::Strided(head);
  const Positions::Segment next = run_at(begin + head.count);
  if (head.count + next.count == count) return Positions::Joined(head, next);
  // More than the two chunks of a zigzag: stripes of one token.
  return Positions::Strided(
      {.first = head.first, .run = 1, .stride = next.first - head.first, .count = count});
}

DealtRows DealRows(const TensorView& whole, const Positions& positions, std::int64_t first) {
  DealtRows dealt;
  const std::size_t row = RowBytes(whole.dtype, whole.dim);
  dealt.bytes.resize(static_cast<std::size_t>(positions.count() * whole.heads) * row);
  CopyRows(
      positions, whole.heads, row,
      [&](std::int64_t position, int head) { return whole.Row(position - first, head); },
      dealt.bytes.data());
  dealt.view =
      TensorView::Dense(dealt.bytes.data(), whole.dtype, positions.count(), whole.heads, whole.dim);
  return dealt;
}

}  // namespace treeline::cli
