#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <vector>

#include "treeline/kv_cache.h"

// Caches filled with tokens that can be recognised. Ranks are caches side by side: they do not
// communicate, so a loop over them is a group of ranks.
namespace treeline::test {

enum Side { kKey, kValue };

inline KvCacheOptions SmallOptions() {
  return {.layers = 2,
          .kv_heads = 2,
          .head_dim = 8,
          .v_head_dim = 16,
          .dtype = DType::kF32,
          .page_slots = 4,
          .pages = 1000};
}

inline int Dim(const KvCacheOptions& options, Side side) {
  return side == kKey ? options.head_dim : options.v_head_dim;
}

// Tokens are told apart by a stamp. Their elements are integers up to 127, and every q8_0 block has
// one of that size, so that all types hold them exactly.
inline float Element(std::int64_t stamp, int layer, Side side, int head, int i) {
  std::uint64_t x = static_cast<std::uint64_t>(stamp) * 0x9E3779B97F4A7C15u;
  for (int part : {layer, static_cast<int>(side), head, i}) {
    x = (x ^ static_cast<std::uint64_t>(part)) * 0xBF58476D1CE4E5B9u;
    x ^= x >> 29;
  }
  if (i % Q8Block::kElements == 0) return x % 2 == 0 ? 127.0f : -127.0f;
  return static_cast<float>(x % 255) - 127.0f;
}

inline std::vector<float> Row(const KvCacheOptions& options, std::int64_t stamp, int layer,
                              Side side, int head) {
  std::vector<float> row;
  for (int i = 0; i < Dim(options, side); ++i) {
    row.push_back(Element(stamp, layer, side, head, i));
  }
  return row;
}

// [stamps, kv_heads, dim] in any type, packed.
inline std::vector<std::byte> Rows(const KvCacheOptions& options,
                                   const std::vector<std::int64_t>& stamps, int layer, Side side,
                                   DType dtype) {
  const std::size_t row_bytes = RowBytes(dtype, Dim(options, side));
  std::vector<std::byte> rows(stamps.size() * static_cast<std::size_t>(options.kv_heads) *
                              row_bytes);
  std::byte* row = rows.data();
  for (std::int64_t stamp : stamps) {
    for (int head = 0; head < options.kv_heads; ++head, row += row_bytes) {
      EncodeRow(dtype, Row(options, stamp, layer, side, head), row);
    }
  }
  return rows;
}

// Writes the tokens with these stamps to one layer, from a source of the given type.
inline void WriteLayer(KvCache& cache, SequenceId id, int layer, SlotRange slots,
                       const std::vector<std::int64_t>& stamps, DType source = DType::kF32) {
  const KvCacheOptions& options = cache.options();
  const auto tokens = static_cast<std::int64_t>(stamps.size());
  const auto k = Rows(options, stamps, layer, kKey, source);
  const auto v = Rows(options, stamps, layer, kValue, source);
  cache.Write(id, layer, slots,
              TensorView::Dense(k.data(), source, tokens, options.kv_heads, options.head_dim),
              TensorView::Dense(v.data(), source, tokens, options.kv_heads, options.v_head_dim));
}

// `stamps` has one for every position of the sequence.
inline void WriteSlots(KvCache& cache, SequenceId id, SlotRange slots,
                       const std::vector<std::int64_t>& stamps, DType source = DType::kF32) {
  const Positions positions = cache.positions(id);
  std::vector<std::int64_t> own;
  for (std::int64_t slot = slots.begin; slot < slots.end; ++slot) {
    own.push_back(stamps.at(static_cast<std::size_t>(positions[slot])));
  }
  for (int layer = 0; layer < cache.options().layers; ++layer) {
    WriteLayer(cache, id, layer, slots, own, source);
  }
}

// `count` stamps from `first` on.
inline std::vector<std::int64_t> Stamps(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> stamps(static_cast<std::size_t>(count));
  std::iota(stamps.begin(), stamps.end(), first);
  return stamps;
}

// Grows a sequence to the tokens with these stamps, of which it has the first.
inline void Extend(KvCache& cache, SequenceId id, const std::vector<std::int64_t>& stamps,
                   DType source = DType::kF32) {
  const SlotRange gained =
      cache.Grow(id, static_cast<std::int64_t>(stamps.size()) - cache.length(id));
  WriteSlots(cache, id, gained, stamps, source);
}

inline std::vector<float> DecodedRow(const KvView& view, std::int64_t slot, int head, Side side) {
  std::vector<float> row(static_cast<std::size_t>(side == kKey ? view.k.dim : view.v.dim));
  DecodeRow(view.dtype, side == kKey ? view.KeyRow(slot, head) : view.ValueRow(slot, head), row);
  return row;
}

// The cache has exactly its rank's tokens of a sequence with these stamps.
inline testing::AssertionResult Holds(const KvCache& cache, SequenceId id,
                                      const std::vector<std::int64_t>& stamps) {
  const KvCacheOptions& options = cache.options();
  if (cache.length(id) != static_cast<std::int64_t>(stamps.size())) {
    return testing::AssertionFailure()
           << "length " << cache.length(id) << ", not " << stamps.size();
  }
  const Positions positions = cache.positions(id);
  for (int layer = 0; layer < options.layers; ++layer) {
    const KvView view = cache.View(id, layer);
    if (view.slots != positions.count()) {
      return testing::AssertionFailure()
             << view.slots << " slots, " << positions.count() << " positions";
    }
    for (std::int64_t slot = 0; slot < view.slots; ++slot) {
      const std::int64_t stamp = stamps.at(static_cast<std::size_t>(positions[slot]));
      for (int head = 0; head < options.kv_heads; ++head) {
        for (Side side : {kKey, kValue}) {
          if (DecodedRow(view, slot, head, side) != Row(options, stamp, layer, side, head)) {
            return testing::AssertionFailure()
                   << "rank " << options.rank << ", layer " << layer << ", slot " << slot
                   << ", head " << head << (side == kKey ? ": key" : ": value")
                   << " is not that of stamp " << stamp;
          }
        }
      }
    }
  }
  return testing::AssertionSuccess();
}

// One cache for each of options.ranks ranks.
inline std::deque<KvCache> Group(KvCacheOptions options) {
  std::deque<KvCache> group;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) group.emplace_back(options);
  return group;
}

}  // namespace treeline::test
