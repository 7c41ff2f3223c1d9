#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "treeline/layout.h"
#include "treeline/view.h"

namespace treeline::cpu {

// Keys whose scores are computed at a time.
inline constexpr int kBlock = 16;

// Walks slots without a division each.
class SlotCursor {
 public:
  SlotCursor(const KvSide& side, std::int64_t page_slots, std::int64_t slot) : side_(side) {
    if (side.pages == nullptr) {
      row_ = static_cast<const std::byte*>(side.base) + slot * side.slot_stride;
      left_ = std::numeric_limits<std::int64_t>::max();
    } else {
      page_slots_ = page_slots;
      page_ = slot / page_slots;
      row_ =
          static_cast<const std::byte*>(side.pages[page_]) + slot % page_slots * side.slot_stride;
      left_ = page_slots - slot % page_slots;
    }
  }
  // The row of the current slot; steps to the next. `last`: there is none to step to.
  const std::byte* Take(bool last) {
    const std::byte* row = row_;
    if (last) return row;
    if (--left_ == 0) {
      row_ = static_cast<const std::byte*>(side_.pages[++page_]);
      left_ = page_slots_;
    } else {
      row_ += side_.slot_stride;
    }
    return row;
  }

 private:
  const KvSide& side_;
  std::int64_t page_slots_ = 0;
  std::int64_t page_ = 0;
  std::int64_t left_;
  const std::byte* row_;
};

// The addresses of consecutive slots' rows of key head 0, in blocks of kBlock keys. With a spread
// of 1 a block's keys are neighbours; otherwise there are `spread` blocks, and neighbours of a
// block are `spread` slots apart: slot of key i of block j is first + i * spread + j.
struct KvGroup {
  const std::byte** k = nullptr;  // [block, key]
  const std::byte** v = nullptr;
  std::int64_t first = 0;
  std::int64_t slots = 0;
  int blocks = 0;
  int spread = 1;

  std::int64_t FirstSlot(int block) const {
    return spread > 1 ? first + block : first + std::int64_t{block} * kBlock;
  }
  std::int64_t SlotOf(int block, int key) const {
    return FirstSlot(block) + std::int64_t{key} * spread;
  }
  // Keys of a block; fewer than kBlock only at the end.
  int KeysOf(int block) const {
    const std::int64_t left = first + slots - FirstSlot(block);
    return static_cast<int>(std::clamp<std::int64_t>((left + spread - 1) / spread, 0, kBlock));
  }

  // Takes slots [begin, end), at most `capacity` blocks of them or, with a spread, `spread` blocks.
  // A short block repeats its last key, so that scores are computed in whole tiles.
  void Fill(const KvView& kv, std::int64_t begin, std::int64_t end, int capacity, int spread_by) {
    spread = spread_by;
    first = begin;
    const int most = spread > 1 ? spread : capacity;
    slots = std::min<std::int64_t>(end - begin, std::int64_t{most} * kBlock);
    blocks = spread > 1 ? spread : static_cast<int>((slots + kBlock - 1) / kBlock);
    SlotCursor keys(kv.k, kv.page_slots, begin);
    SlotCursor values(kv.v, kv.page_slots, begin);
    int block = 0;
    int key = 0;
    for (std::int64_t i = 0; i < slots; ++i) {
      k[block * kBlock + key] = keys.Take(i + 1 == slots);
      v[block * kBlock + key] = values.Take(i + 1 == slots);
      if (spread > 1 ? ++block == spread : ++key == kBlock) {
        block = spread > 1 ? 0 : block + 1;
        key = spread > 1 ? key + 1 : 0;
      }
    }
    if (slots == std::int64_t{blocks} * kBlock) return;
    for (int b = 0; b < blocks; ++b) {
      const int count = KeysOf(b);
      for (int i = count; count > 0 && i < kBlock; ++i) {
        k[b * kBlock + i] = k[b * kBlock + count - 1];
      }
    }
  }
};

}  // namespace treeline::cpu
