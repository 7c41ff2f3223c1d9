#include "treeline/kv_cache.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "core/check.h"
#include "treeline/spec.h"

namespace treeline {
namespace {

// A page of the largest shape, 2^12 layers of 2^16 heads of 2^20 slots of 2 * 2,304 bytes, stays
// within int64.
constexpr int kMaxLayers = 1 << 12;
constexpr std::int64_t kMaxPageSlots = 1 << 20;
constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max() / 2;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;  // as for a Layout
constexpr std::int64_t kPageAlignment = 64;
// Of pages that are allocated together. One by one under a sanitizer, which sees the ends of each.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kSlabBytes = 0;
#else
constexpr std::int64_t kSlabBytes = std::int64_t{16} << 20;
#endif

std::int64_t Number(SequenceId id) { return static_cast<std::int64_t>(id); }

void RequireFrom1(const char* name, std::int64_t value, std::int64_t highest) {
  Require(value >= 1 && value <= highest, name, " is ", value, "; it must be from 1 to ", highest);
}

void RequireDim(const char* name, int dim) {
  Require(dim >= 8 && dim <= AttentionSpec::kMaxHeadDim && dim % 8 == 0, name, " is ", dim,
          "; it must be a multiple of 8 from 8 to ", AttentionSpec::kMaxHeadDim);
}

void Validate(const KvCacheOptions& options) {
  Layout::Striped(0, options.ranks, options.run);  // throws if they are out of range
  Require(options.rank >= 0 && options.rank < options.ranks, "rank is ", options.rank,
          "; it must be from 0 to ", options.ranks - 1);
  RequireFrom1("layers", options.layers, kMaxLayers);
  RequireFrom1("kv_heads", options.kv_heads, AttentionSpec::kMaxHeads);
  RequireDim("head_dim", options.head_dim);
  RequireDim("v_head_dim", options.v_head_dim);
  Name(options.dtype);  // throws if it is none
  RequireFrom1("page_slots", options.page_slots, kMaxPageSlots);
  Require(std::has_single_bit(static_cast<std::uint64_t>(options.page_slots)), "page_slots is ",
          options.page_slots, "; it must be a power of two");
}

// Rows may overlap, as those of a stride of 0 do, and go backwards: they are only read.
void RequireStride(const char* name, const char* dimension, std::int64_t count, std::int64_t stride,
                   DType dtype) {
  if (count <= 1) return;
  const auto alignment = static_cast<std::int64_t>(Alignment(dtype));
  Require(stride % alignment == 0, name, "'s ", dimension, " stride is ", stride,
          " bytes; it must be a multiple of ", alignment);
  std::int64_t reach = 0;
  Require(!__builtin_mul_overflow(count - 1, stride, &reach) && reach >= -kMaxBytes / 2 &&
              reach <= kMaxBytes / 2,
          name, " has ", count, " ", dimension, "s ", stride, " bytes apart: too large to address");
}

void RequireSource(const char* name, const TensorView& view, std::int64_t tokens, int heads,
                   int dim, DType target) {
  Require(Name(view.dtype) != Name(DType::kQ8_0) || target == DType::kQ8_0, name,
          " is q8_0; rows of ", Name(target), " are written from f32, bf16 or f16");
  Require(view.tokens == tokens, name, " has ", view.tokens, " tokens; there are ", tokens,
          " slots to write");
  Require(view.heads == heads, name, " has ", view.heads, " heads; the cache has ", heads);
  Require(view.dim == dim, name, " has dim ", view.dim, "; the cache has ", dim);
  if (tokens == 0) return;
  Require(view.data != nullptr, name, " is null");
  const std::size_t alignment = Alignment(view.dtype);
  Require(reinterpret_cast<std::uintptr_t>(view.data) % alignment == 0, name, " is at ", view.data,
          "; it must be aligned to ", alignment, " bytes");
  RequireStride(name, "token", view.tokens, view.token_stride, view.dtype);
  RequireStride(name, "head", view.heads, view.head_stride, view.dtype);
}

}  // namespace

KvCache::KvCache(const KvCacheOptions& options, MemoryTracker* tracker)
    : options_(options), tracker_(tracker) {
  Validate(options);
  for (std::size_t i = 0; i < sides_.size(); ++i) {
    const int dim = i == 0 ? options.head_dim : options.v_head_dim;
    const auto row_bytes = static_cast<std::int64_t>(RowBytes(options.dtype, dim));
    sides_[i] = {dim, layer_bytes_, row_bytes, options.page_slots * row_bytes};
    const std::int64_t bytes = options.kv_heads * sides_[i].head_bytes;
    layer_bytes_ += (bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  }
  page_bytes_ = options.layers * layer_bytes_;
  Require(options.pages >= 1 && options.pages <= kMaxBytes / page_bytes_, "pages is ",
          options.pages, "; with ", page_bytes_, " bytes a page it must be from 1 to ",
          kMaxBytes / page_bytes_);
  slab_pages_ = std::max<std::int64_t>(1, std::min(options.pages, kSlabBytes / page_bytes_));
}

SequenceId KvCache::Add() {
  const SequenceId id = Add(next_first_rank_);
  next_first_rank_ = (next_first_rank_ + 1) % options_.ranks;
  return id;
}

SequenceId KvCache::Add(int first_rank) {
  Require(first_rank >= 0 && first_rank < options_.ranks, "first_rank is ", first_rank,
          "; it must be from 0 to ", options_.ranks - 1);
  Sequence sequence;
  sequence.first_rank = first_rank;
  sequence.addresses.resize(sides_.size() * static_cast<std::size_t>(options_.layers));
  const SequenceId id{last_id_ + 1};
  sequences_.emplace(id, std::move(sequence));
  ++last_id_;
  return id;
}

SequenceId KvCache::Fork(SequenceId id) {
  const Sequence& parent = Find(id);
  const SequenceId child{last_id_ + 1};
  sequences_.emplace(child, parent);
  ++last_id_;
  for (std::size_t page : parent.pages) ++pages_[page].holders;
  return child;
}

void KvCache::Free(SequenceId id) {
  for (std::size_t page : Find(id).pages) Drop(page);
  sequences_.erase(id);
}

std::int64_t KvCache::length(SequenceId id) const { return Find(id).length; }

int KvCache::first_rank(SequenceId id) const { return Find(id).first_rank; }

Positions KvCache::positions(SequenceId id) const {
  const Sequence& sequence = Find(id);
  return Shard(sequence, sequence.length);
}

std::vector<Positions> KvCache::shards(SequenceId id) const {
  const Sequence& sequence = Find(id);
  const Layout layout =
      Layout::Striped(sequence.length, options_.ranks, options_.run, sequence.first_rank);
  std::vector<Positions> shards;
  shards.reserve(static_cast<std::size_t>(options_.ranks));
  for (int rank = 0; rank < options_.ranks; ++rank) shards.push_back(layout.Shard(rank));
  return shards;
}

SlotRange KvCache::Grow(SequenceId id, std::int64_t tokens) {
  Sequence& sequence = Find(id);
  const std::int64_t slots = RequireGrowth(sequence, tokens);
  const auto pages = static_cast<std::size_t>(PagesOf(slots));
  Prepare(id, PagesToReach(sequence, slots));
  Reserve(sequence, pages);
  // From here on nothing throws.
  const SlotRange gained{sequence.slots, slots};
  if (gained.size() > 0 && gained.begin % options_.page_slots != 0) {
    Unshare(sequence, sequence.pages.size() - 1);
  }
  while (sequence.pages.size() < pages) SetPage(sequence, sequence.pages.size(), Take());
  sequence.slots = slots;
  sequence.length += tokens;
  return gained;
}

std::int64_t KvCache::PagesToGrow(SequenceId id, std::int64_t tokens) const {
  const Sequence& sequence = Find(id);
  return PagesToReach(sequence, RequireGrowth(sequence, tokens));
}

void KvCache::Truncate(SequenceId id, std::int64_t length) {
  Sequence& sequence = Find(id);
  Require(length >= 0 && length <= sequence.length, "length is ", length, "; sequence ", Number(id),
          " can be truncated to 0 to ", sequence.length, " tokens");
  const std::int64_t slots = Shard(sequence, length).count();
  const auto pages = static_cast<std::size_t>(PagesOf(slots));
  for (std::size_t i = pages; i < sequence.pages.size(); ++i) Drop(sequence.pages[i]);
  sequence.pages.resize(pages);
  for (auto& addresses : sequence.addresses) addresses.resize(pages);
  const std::int64_t in_last_page = slots % options_.page_slots;
  if (in_last_page != 0 && !IsShared(sequence, pages - 1)) {
    Poison(sequence.pages.back(), in_last_page);
  }
  sequence.slots = slots;
  sequence.length = length;
}

void KvCache::Write(SequenceId id, int layer, SlotRange slots, const TensorView& k,
                    const TensorView& v) {
  Sequence& sequence = Find(id);
  RequireLayer(layer);
  Require(slots.begin >= 0 && slots.begin <= slots.end && slots.end <= sequence.slots,
          "slots are [", slots.begin, ", ", slots.end, "); sequence ", Number(id),
          " has slots [0, ", sequence.slots, ") on rank ", options_.rank);
  const std::array<const TensorView*, 2> sources{&k, &v};
  RequireSource("k", k, slots.size(), options_.kv_heads, options_.head_dim, options_.dtype);
  RequireSource("v", v, slots.size(), options_.kv_heads, options_.v_head_dim, options_.dtype);
  if (slots.size() == 0) return;

  const std::int64_t page_slots = options_.page_slots;
  const auto first_page = static_cast<std::size_t>(slots.begin / page_slots);
  const auto end_page = static_cast<std::size_t>(PagesOf(slots.end));
  std::int64_t shared = 0;
  for (std::size_t i = first_page; i < end_page; ++i) shared += IsShared(sequence, i) ? 1 : 0;
  Prepare(id, shared);
  // From here on nothing throws.
  for (std::size_t i = first_page; i < end_page; ++i) {
    Unshare(sequence, i);
    std::byte* layer_start = pages_[sequence.pages[i]].memory + layer * layer_bytes_;
    const std::int64_t page_begin = static_cast<std::int64_t>(i) * page_slots;
    const std::int64_t begin = std::max(slots.begin, page_begin);
    const std::int64_t end = std::min(slots.end, page_begin + page_slots);
    for (std::size_t s = 0; s < sides_.size(); ++s) {
      WriteRows(layer_start, sides_[s], {begin - page_begin, end - page_begin}, *sources[s],
                begin - slots.begin);
    }
  }
}

KvView KvCache::View(SequenceId id, int layer) const {
  const Sequence& sequence = Find(id);
  RequireLayer(layer);
  const std::size_t first = sides_.size() * static_cast<std::size_t>(layer);
  return KvView::Paged(sequence.addresses[first], sequence.addresses[first + 1], options_.dtype,
                       sequence.slots, options_.page_slots, options_.kv_heads, options_.head_dim,
                       options_.v_head_dim);
}

const KvCache::Sequence& KvCache::Find(SequenceId id) const {
  const auto found = sequences_.find(id);
  if (found != sequences_.end()) return found->second;
  const bool was_freed = Number(id) >= 1 && Number(id) <= last_id_;
  Throw<ArgumentError>("sequence ", Number(id), was_freed ? " was freed" : " was never added",
                       "; the cache has ", sequences_.size(), " sequences, and ", last_id_,
                       " is the last id given");
}

KvCache::Sequence& KvCache::Find(SequenceId id) {
  return const_cast<Sequence&>(static_cast<const KvCache*>(this)->Find(id));
}

void KvCache::RequireLayer(int layer) const {
  Require(layer >= 0 && layer < options_.layers, "layer is ", layer, "; it must be from 0 to ",
          options_.layers - 1);
}

// The slots of this rank after growing.
std::int64_t KvCache::RequireGrowth(const Sequence& sequence, std::int64_t tokens) const {
  Require(tokens >= 0 && tokens <= kMaxTokens - sequence.length, "tokens is ", tokens,
          "; a sequence of ", sequence.length, " can grow by 0 to ", kMaxTokens - sequence.length);
  return Shard(sequence, sequence.length + tokens).count();
}

Positions KvCache::Shard(const Sequence& sequence, std::int64_t length) const {
  return Layout::Striped(length, options_.ranks, options_.run, sequence.first_rank)
      .Shard(options_.rank);
}

std::int64_t KvCache::PagesOf(std::int64_t slots) const {
  return (slots + options_.page_slots - 1) / options_.page_slots;
}

// The pages that a sequence must take to have `slots` slots, at least those that it has: new ones,
// and a copy of its last one if that is shared and would be grown into.
std::int64_t KvCache::PagesToReach(const Sequence& sequence, std::int64_t slots) const {
  const std::int64_t added = PagesOf(slots) - static_cast<std::int64_t>(sequence.pages.size());
  const bool into_last = slots > sequence.slots && sequence.slots % options_.page_slots != 0;
  return added + (into_last && IsShared(sequence, sequence.pages.size() - 1) ? 1 : 0);
}

}  // namespace treeline
