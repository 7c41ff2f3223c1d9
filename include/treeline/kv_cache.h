#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "treeline/dtype.h"
#include "treeline/layout.h"
#include "treeline/memory.h"
#include "treeline/view.h"

namespace treeline {

// Names a sequence of a cache. Never reused; SequenceId{} names none.
enum class SequenceId : std::int64_t {};

struct KvCacheOptions {
  int rank = 0;  // the one that holds this cache, of `ranks`
  int ranks = 1;
  int layers = 1;
  int kv_heads = 1;
  int head_dim = 0;    // of keys; a multiple of 8, as in AttentionSpec
  int v_head_dim = 0;  // of values; likewise
  DType dtype = DType::kBF16;
  std::int64_t run = 1;           // consecutive tokens that one rank holds
  std::int64_t page_slots = 256;  // tokens of a page; a power of two
  std::int64_t pages = 0;         // the most that this rank may hold
};

// One rank's shard of the keys and values of many sequences, in pages that kernels read in place.
//
// Tokens are striped: position p of a sequence is on rank (first_rank + p / run) mod ranks, so
// ranks are within one run of each other however a sequence grows. Every rank has a cache of its
// own, and caches do not communicate: they agree if all get the same calls in the same order,
// except for Write, which gets the slots of its rank.
//
// A page holds page_slots slots of one sequence in all layers: for each layer K [kv_head, slot,
// head_dim], then V [kv_head, slot, v_head_dim], each at a multiple of 64 bytes. Forks share pages;
// a shared page is copied when one of its sequences grows or writes into it.
//
// Errors. A call that throws has changed nothing. ArgumentError: an argument is out of range, an id
// is unknown or freed, or there are too few free pages, which a caller can mend with Free or
// Truncate. std::bad_alloc: the system has no memory for a page that the options allow.
//
// Threads. Not thread-safe: it belongs to one rank's own thread. Kernels may read views from any
// number of threads while no call changes the cache.
class KvCache {
 public:
  // Allocates no page yet. `tracker`, which may be null, outlives the cache and counts its pages as
  // Purpose::kShard. Throws ArgumentError that names the first option out of range.
  explicit KvCache(const KvCacheOptions& options, MemoryTracker* tracker = nullptr);
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvCacheOptions& options() const { return options_; }

  // A new sequence without tokens. Without an argument, calls deal first ranks round robin from 0,
  // so that many short sequences do not all load the same rank.
  SequenceId Add();
  SequenceId Add(int first_rank);

  // A new sequence with the tokens and first rank of `id`, sharing all of its pages.
  SequenceId Fork(SequenceId id);

  // Ends a sequence. Pages that no other sequence shares are free again.
  void Free(SequenceId id);

  // Tokens of all ranks.
  std::int64_t length(SequenceId id) const;
  int first_rank(SequenceId id) const;
  // Of the slots of this rank.
  Positions positions(SequenceId id) const;
  // Of the slots of every rank: [ranks].
  std::vector<Positions> shards(SequenceId id) const;

  // Appends `tokens` tokens, all ranks together, and returns the slots that this rank gains, which
  // may be none. Their contents are undefined until they are written.
  // A rank can be full while another, with one run less, is not. Ranks that must not part agree on
  // PagesToGrow(id, tokens) <= free_pages() before they grow.
  SlotRange Grow(SequenceId id, std::int64_t tokens);

  // The free pages that Grow(id, tokens) would take on this rank.
  std::int64_t PagesToGrow(SequenceId id, std::int64_t tokens) const;

  // Drops tokens from the end until `length` are left, and the pages that held only those.
  void Truncate(SequenceId id, std::int64_t length);

  // Stores rows of one layer in slots that were grown, written before or not: k [slots, kv_heads,
  // head_dim] and v [slots, kv_heads, v_head_dim] in f32, bf16, f16 or the cache's own dtype,
  // outside of this cache, with any strides that keep rows aligned. They are rounded to the cache's
  // dtype; rows that have it already are copied. Takes a free page for each page of the range that
  // is shared.
  void Write(SequenceId id, int layer, SlotRange slots, const TensorView& k, const TensorView& v);

  // What this rank holds of one layer, where it lies. Valid until the sequence itself grows, is
  // written, truncated or freed; other sequences may change.
  KvView View(SequenceId id, int layer) const;

  // Pages that sequences hold; a shared one counts once.
  std::int64_t used_pages() const { return used_pages_; }
  // The most that they ever held.
  std::int64_t peak_pages() const { return peak_pages_; }
  std::int64_t free_pages() const { return options_.pages - used_pages_; }
  std::size_t bytes_per_page() const { return static_cast<std::size_t>(page_bytes_); }

 private:
  // Where the keys or the values of a layer lie in it, in bytes.
  struct Side {
    int dim;
    std::int64_t offset;
    std::int64_t row_bytes;
    std::int64_t head_bytes;
  };

  // Made when it is first needed, and kept when no sequence holds it, so that pages in steady use
  // cost no system call or page fault.
  struct Page {
    std::byte* memory;  // in a slab
    TrackedBytes counted;
    std::int64_t holders;  // sequences
  };

  struct Sequence {
    int first_rank = 0;
    std::int64_t length = 0;
    std::int64_t slots = 0;          // of this rank
    std::vector<std::size_t> pages;  // indices into pages_, as many as the slots need
    // [layer, K and V][page]: the addresses that views borrow.
    std::vector<std::vector<const void*>> addresses;
  };

  // kv_cache.cc
  Sequence& Find(SequenceId id);
  const Sequence& Find(SequenceId id) const;
  void RequireLayer(int layer) const;
  std::int64_t RequireGrowth(const Sequence& sequence, std::int64_t tokens) const;
  Positions Shard(const Sequence& sequence, std::int64_t length) const;
  std::int64_t PagesOf(std::int64_t slots) const;
  std::int64_t PagesToReach(const Sequence& sequence, std::int64_t slots) const;

  // kv_pages.cc
  bool IsShared(const Sequence& sequence, std::size_t index) const;
  void Prepare(SequenceId id, std::int64_t pages);
  void Reserve(Sequence& sequence, std::size_t pages);
  std::size_t Take() noexcept;
  void Drop(std::size_t page) noexcept;
  void SetPage(Sequence& sequence, std::size_t index, std::size_t page) noexcept;
  void Unshare(Sequence& sequence, std::size_t index) noexcept;
  template <class Body>
  void ForEachBlock(std::int64_t begin, std::int64_t end, const Body& body) const;
  void Poison(std::size_t page, std::int64_t begin) noexcept;
  void WriteRows(std::byte* layer, const Side& side, SlotRange slots, const TensorView& source,
                 std::int64_t token) noexcept;

  KvCacheOptions options_;
  MemoryTracker* tracker_;
  std::array<Side, 2> sides_{};  // K, V
  std::int64_t layer_bytes_ = 0;
  std::int64_t page_bytes_ = 0;

  // Several pages each, so that small ones share huge pages of the system. What no page has come
  // to lie in costs addresses, but no memory.
  std::vector<TrackedBuffer> slabs_;
  std::int64_t slab_pages_ = 1;
  std::vector<Page> pages_;         // all that were ever made
  std::vector<std::size_t> spare_;  // those without holders; has room for all
  std::int64_t used_pages_ = 0;
  std::int64_t peak_pages_ = 0;
  std::map<SequenceId, Sequence> sequences_;  // a node keeps its address while others come and go
  std::int64_t last_id_ = 0;
  int next_first_rank_ = 0;
};

}  // namespace treeline
