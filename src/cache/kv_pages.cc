// The pages of a KvCache: how sequences take, share and fill them.

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "core/check.h"
#include "treeline/kv_cache.h"
#include "treeline/spec.h"

namespace treeline {
namespace {

// Debug builds fill slots that hold nothing with NaN, as TrackedBuffer does with new memory.
#ifdef NDEBUG
constexpr bool kPoison = false;
#else
constexpr bool kPoison = true;
#endif
constexpr int kPoisonByte = 0xFF;

void ConvertRow(DType from, const std::byte* source, DType to, std::byte* target,
                int dim) noexcept {
  const auto elements = static_cast<std::size_t>(dim);
  if (from == to) {
    std::memcpy(target, source, RowBytes(to, dim));
    return;
  }
  if (from == DType::kF32) {
    EncodeRow(to, {reinterpret_cast<const float*>(source), elements}, target);
    return;
  }
  std::array<float, AttentionSpec::kMaxHeadDim> row;
  const std::span<float> widened(row.data(), elements);
  DecodeRow(from, source, widened);
  EncodeRow(to, widened, target);
}

// Room for `size` elements in all, growing by doubling where it grows by little.
template <class T>
void ReserveIn(std::vector<T>& vector, std::size_t size) {
  if (size > vector.capacity()) vector.reserve(std::max(size, 2 * vector.capacity()));
}

}  // namespace

bool KvCache::IsShared(const Sequence& sequence, std::size_t index) const {
  return pages_[sequence.pages[index]].holders > 1;
}

// Makes `pages` calls of Take possible. Pages that it allocates before it throws are spare ones.
void KvCache::Prepare(SequenceId id, std::int64_t pages) {
  Require(pages <= free_pages(), "sequence ", static_cast<std::int64_t>(id), " needs ", pages,
          " more pages; ", free_pages(), " of ", options_.pages, " are free");
  while (spare_.size() < static_cast<std::size_t>(pages)) {
    ReserveIn(pages_, pages_.size() + 1);
    ReserveIn(spare_, pages_.size() + 1);  // for Drop, which must not throw
    const auto slab = pages_.size() / static_cast<std::size_t>(slab_pages_);
    const auto place = pages_.size() % static_cast<std::size_t>(slab_pages_);
    if (slab == slabs_.size()) {
      slabs_.emplace_back(bytes_per_page() * static_cast<std::size_t>(slab_pages_), Purpose::kShard,
                          nullptr);
    }
    pages_.push_back({slabs_[slab].data() + place * bytes_per_page(),
                      TrackedBytes(bytes_per_page(), Purpose::kShard, tracker_), 0});
    spare_.push_back(pages_.size() - 1);
  }
}

std::size_t KvCache::Take() noexcept {
  const std::size_t page = spare_.back();
  spare_.pop_back();
  pages_[page].holders = 1;
  ++used_pages_;
  peak_pages_ = std::max(peak_pages_, used_pages_);
  return page;
}

void KvCache::Drop(std::size_t page) noexcept {
  if (--pages_[page].holders > 0) return;
  Poison(page, 0);
  spare_.push_back(page);
  --used_pages_;
}

// Makes room in a sequence for `pages` pages in all.
void KvCache::Reserve(Sequence& sequence, std::size_t pages) {
  ReserveIn(sequence.pages, pages);
  for (auto& addresses : sequence.addresses) ReserveIn(addresses, pages);
}

// Replaces a page of a sequence, or appends one, for which there must be room.
void KvCache::SetPage(Sequence& sequence, std::size_t index, std::size_t page) noexcept {
  const std::size_t count = std::max(sequence.pages.size(), index + 1);
  sequence.pages.resize(count);
  sequence.pages[index] = page;
  const std::byte* layer_start = pages_[page].memory;
  auto addresses = sequence.addresses.begin();
  for (int layer = 0; layer < options_.layers; ++layer, layer_start += layer_bytes_) {
    for (const Side& side : sides_) {
      addresses->resize(count);
      (*addresses)[index] = layer_start + side.offset;
      ++addresses;
    }
  }
}

// Gives a sequence a copy of its own of a page that it shares: of the slots that it uses.
void KvCache::Unshare(Sequence& sequence, std::size_t index) noexcept {
  if (!IsShared(sequence, index)) return;
  const std::size_t shared = sequence.pages[index];
  const std::size_t own = Take();
  const std::byte* from = pages_[shared].memory;
  std::byte* to = pages_[own].memory;
  const std::int64_t slots = std::min(
      options_.page_slots, sequence.slots - static_cast<std::int64_t>(index) * options_.page_slots);
  ForEachBlock(0, slots, [&](std::int64_t offset, std::size_t bytes) {
    std::memcpy(to + offset, from + offset, bytes);
  });
  Drop(shared);
  SetPage(sequence, index, own);
}

// Calls body(offset, bytes) for each of the blocks in which a page holds slots [begin, end): one
// for each layer, side and head.
template <class Body>
void KvCache::ForEachBlock(std::int64_t begin, std::int64_t end, const Body& body) const {
  for (int layer = 0; layer < options_.layers; ++layer) {
    for (const Side& side : sides_) {
      for (int head = 0; head < options_.kv_heads; ++head) {
        body(layer * layer_bytes_ + side.offset + head * side.head_bytes + begin * side.row_bytes,
             static_cast<std::size_t>((end - begin) * side.row_bytes));
      }
    }
  }
}

// Slots from `begin` on hold nothing any more.
void KvCache::Poison(std::size_t page, std::int64_t begin) noexcept {
  if constexpr (kPoison) {
    std::byte* start = pages_[page].memory;
    ForEachBlock(begin, options_.page_slots, [&](std::int64_t offset, std::size_t bytes) {
      std::memset(start + offset, kPoisonByte, bytes);
    });
  }
}

// Stores tokens [token, token + slots.size()) of a source in slots of the page that has this layer.
void KvCache::WriteRows(std::byte* layer, const Side& side, SlotRange slots,
                        const TensorView& source, std::int64_t token) noexcept {
  for (int head = 0; head < options_.kv_heads; ++head) {
    std::byte* target = layer + side.offset + head * side.head_bytes;
    for (std::int64_t slot = slots.begin; slot < slots.end; ++slot) {
      ConvertRow(source.dtype, source.Row(token + slot - slots.begin, head), options_.dtype,
                 target + slot * side.row_bytes, side.dim);
    }
  }
}

}  // namespace treeline
