// Decoding: a few query rows over many keys, at the speed of memory.
//
// All rows of a key head share one read of K and V. Lanes are dims. Keys are taken in blocks of 16;
// while the scores of a block are computed the next block's keys are fetched, and while its values
// are weighed the next block's values are. Where rows see different keys, blocks are taken in order
// and each row weighs only what it sees.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/kv_load-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kBlock = 16;                            // keys whose scores are computed at a time
constexpr int kSlabRows = 4;                          // query rows that are computed together
constexpr int kTileKeys = kManyRegisters ? 4 : 2;     // register tile of scores: keys x kSlabRows
constexpr int kTileVectors = kManyRegisters ? 4 : 3;  // of the output: kSlabRows x vectors
constexpr int kMaxSpread = 17;                        // blocks that are interleaved
constexpr int kPage = 4096;
static_assert(kBlock % kTileKeys == 0);

int RoundUp(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows of one slab and what has been summed for them.
struct alignas(64) SlabState {
  // Per row, repeated to fill a vector, log2 domain; may lag.
  float maximum[kSlabRows > kLanes ? kSlabRows : kLanes];
  // Lane i sums weights of row i % kSlabRows.
  float sum[kSlabRows > kLanes ? kSlabRows : kLanes];
};

struct Workspace {
  Workspace(const AttentionSpec& spec, std::int64_t tokens, int kv_heads, std::byte* base) {
    Arena arena(base);
    rows = static_cast<int>(tokens) * spec.group();
    slabs = (rows + kSlabRows - 1) / kSlabRows;
    qk_dim = RoundUp(spec.head_dim, kChunk);
    v_dim = RoundUp(spec.v_head_dim, kChunk);
    const auto padded_rows = static_cast<std::size_t>(kv_heads) * slabs * kSlabRows;
    query = arena.Take<float>(padded_rows * qk_dim);
    out = arena.Take<float>(padded_rows * v_dim);
    state = arena.Take<SlabState>(static_cast<std::size_t>(kv_heads) * slabs);
    visible = arena.Take<SlotRange>(static_cast<std::size_t>(tokens));
    row = arena.Take<float>(AttentionSpec::kMaxHeadDim);
    bytes = arena.used();
  }

  int rows;    // of a key head
  int slabs;   // of a key head
  int qk_dim;  // padded to chunks
  int v_dim;
  float* query;        // [kv_head, slab, kSlabRows, qk_dim], scaled and packed
  float* out;          // [kv_head, slab, kSlabRows, v_dim], packed, not yet normalised
  SlabState* state;    // [kv_head, slab]
  SlotRange* visible;  // [token]
  float* row;
  std::size_t bytes;
};

// The addresses of up to kBlock * kMaxSpread slots' rows of key head 0.
struct Group {
  int blocks = 0;
  int keys = 0;
  std::int64_t first_slot = 0;
  int spread = 1;                           // slot of key i of block j: first_slot + i * spread + j
  const std::byte* k[kBlock * kMaxSpread];  // [block, key]
  const std::byte* v[kBlock * kMaxSpread];

  int KeysOf(int block) const { return std::min(kBlock, keys - block * kBlock); }
};

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

// Sums of the lanes of four vectors.
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void StoreSums(VF a, VF b, VF c, VF e, float* sums) {
  sums[0] = hn::GetLane(a);
  sums[1] = hn::GetLane(b);
  sums[2] = hn::GetLane(c);
  sums[3] = hn::GetLane(e);
}
#else
template <class D, class V>
HWY_INLINE hn::Vec<hn::Full128<float>> FoldTo128(D /*d*/, V v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return FoldTo128(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

HWY_INLINE void StoreSums(VF a, VF b, VF c, VF e, float* sums) {
  const DF d;
  const hn::Repartition<double, DF> dd;
  const VF ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce));
  const auto high = hn::InterleaveUpper(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce));
  const VF folded = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));
  hn::StoreU(FoldTo128(d, folded), hn::Full128<float>(), sums);
}
#endif

template <class Loader>
class Decoder {
 public:
  explicit Decoder(const DecodeArgs& args)
      : args_(args),
        spec_(*args.spec),
        task_(*args.task),
        kv_(args.task->kv),
        map_(spec_),
        w_(spec_, task_.q.tokens, args.kv_head_end - args.kv_head_begin, args.workspace),
        k_bytes_(static_cast<int>(RowBytes(kv_.dtype, spec_.head_dim))),
        v_bytes_(static_cast<int>(RowBytes(kv_.dtype, spec_.v_head_dim))) {}

  void Run() {
    LoadQueries();
    // All rows see `common`; some see the rest of `any`.
    SlotRange any{args_.slots.end, args_.slots.begin};
    SlotRange common = args_.slots;
    for (std::int64_t t = 0; t < task_.q.tokens; ++t) {
      const SlotRange& range = w_.visible[t];
      common.begin = std::max(common.begin, range.begin);
      common.end = std::min(common.end, range.end);
      if (range.size() > 0) {
        any.begin = std::min(any.begin, std::max(range.begin, args_.slots.begin));
        any.end = std::max(any.end, std::min(range.end, args_.slots.end));
      }
    }
    if (common.size() <= 0) common = {any.end, any.end};
    const std::int64_t whole = common.size() / kBlock * kBlock;
    Masked({any.begin, common.begin});
    Unmasked({common.begin, common.begin + whole});
    Masked({common.begin + whole, any.end});
    StoreResult();
  }

 private:
  int heads() const { return args_.kv_head_end - args_.kv_head_begin; }

  void LoadQueries() {
    const int group = spec_.group();
    for (std::int64_t t = 0; t < task_.q.tokens; ++t) {
      w_.visible[t] = Visible(spec_, task_.q_positions[t], task_.kv_positions);
    }
    const auto padded_rows = static_cast<std::size_t>(heads()) * w_.slabs * kSlabRows;
    std::memset(w_.query, 0, sizeof(float) * padded_rows * w_.qk_dim);
    std::memset(w_.out, 0, sizeof(float) * padded_rows * w_.v_dim);
    for (int h = 0; h < heads(); ++h) {
      for (int s = 0; s < w_.slabs; ++s) {
        SlabState& state = w_.state[h * w_.slabs + s];
        std::fill(std::begin(state.maximum), std::end(state.maximum), kNoScore);
        std::fill(std::begin(state.sum), std::end(state.sum), 0.0f);
      }
      for (int r = 0; r < w_.rows; ++r) {
        const int head = (args_.kv_head_begin + h) * group + r % group;
        WidenRow(task_.q.dtype, task_.q.Row(r / group, head), spec_.head_dim, w_.row);
        float* packed = Query(h, r / kSlabRows) + r % kSlabRows * w_.qk_dim;
        for (int d = 0; d < spec_.head_dim; ++d) {
          packed[Packed<Loader>(d)] = w_.row[d] * map_.query_scale;
        }
      }
    }
  }

  // Slots that every row sees, a whole number of blocks.
  void Unmasked(SlotRange range) {
    if (range.size() <= 0) return;
    // Where a slot's heads are neighbours, all heads read it before the next slot is touched.
    const bool heads_inner = kv_.k.head_stride < kv_.k.slot_stride;
    const int spread = Spread(heads_inner);
    Group groups[2];
    std::int64_t slot = FillGroup(range.begin, range.end, spread, groups[0]);
    for (int current = 0;; current ^= 1) {
      Group& group = groups[current];
      Group& following = groups[current ^ 1];
      following.blocks = 0;
      if (slot < range.end) slot = FillGroup(slot, range.end, spread, following);
      const int steps = group.blocks * heads();
      for (int step = 0; step < steps; ++step) {
        const auto [block, head] = Place(step, group, heads_inner);
        const Group& next_group = step + 1 < steps || following.blocks == 0 ? group : following;
        const int next_step = step + 1 < steps ? step + 1 : 0;
        const auto [next_block, next_head] = Place(next_step, next_group, heads_inner);
        AttendBlock(group, block, head, next_group, next_block, next_head);
      }
      if (following.blocks == 0) return;
    }
  }

  // Distance in slots between neighbours in a block: just over 4 KiB, so that many DRAM pages are
  // open and rows do not fall into the same set of the first-level cache. Machines with narrower
  // vectors do better when a head's rows are read in order, if they lie in order.
  int Spread(bool heads_inner) const {
    if (!kManyRegisters && !heads_inner) return 1;
    const std::int64_t stride = std::max<std::int64_t>(kv_.k.slot_stride, 1);
    return static_cast<int>(std::min<std::int64_t>(kPage / stride + 1, kMaxSpread));
  }

  struct BlockHead {
    int block;
    int head;
  };
  BlockHead Place(int step, const Group& group, bool heads_inner) const {
    if (heads_inner) return {step / heads(), step % heads()};
    return {step % group.blocks, step / group.blocks};
  }

  // Fills as many slots as fit; interleaved by `spread` where a whole group is left, else in order.
  std::int64_t FillGroup(std::int64_t slot, std::int64_t end, int spread, Group& group) const {
    if (end - slot < kBlock * spread) spread = 1;
    const int blocks = spread > 1 ? spread
                                  : static_cast<int>(std::min<std::int64_t>(
                                        kMaxSpread, (end - slot + kBlock - 1) / kBlock));
    group.blocks = blocks;
    group.keys = static_cast<int>(std::min<std::int64_t>(end - slot, blocks * kBlock));
    group.first_slot = slot;
    group.spread = spread;
    SlotCursor k(kv_.k, kv_.page_slots, slot);
    SlotCursor v(kv_.v, kv_.page_slots, slot);
    if (spread > 1) {
      for (int key = 0; key < kBlock; ++key) {
        for (int block = 0; block < spread; ++block) {
          const bool last = key + 1 == kBlock && block + 1 == spread;
          group.k[block * kBlock + key] = k.Take(last);
          group.v[block * kBlock + key] = v.Take(last);
        }
      }
    } else {
      for (int i = 0; i < group.keys; ++i) {
        group.k[i] = k.Take(i + 1 == group.keys);
        group.v[i] = v.Take(i + 1 == group.keys);
      }
    }
    // A short last block repeats its last key, so that scores are computed in whole tiles.
    for (int i = group.keys; i % kBlock != 0; ++i) group.k[i] = group.k[group.keys - 1];
    return slot + group.keys;
  }

  // Slots that only some rows see, in order.
  void Masked(SlotRange range) {
    Group group;
    for (std::int64_t slot = range.begin; slot < range.end;) {
      slot = FillGroup(slot, range.end, 1, group);
      for (int h = 0; h < heads(); ++h) {
        for (int block = 0; block < group.blocks; ++block) AttendMasked(group, block, h);
      }
    }
  }

  void AttendBlock(const Group& group, int block, int head, const Group& next_group, int next_block,
                   int next_head) {
    const std::byte* const* k = group.k + block * kBlock;
    const std::byte* const* v = group.v + block * kBlock;
    const std::int64_t k_offset = (args_.kv_head_begin + head) * kv_.k.head_stride;
    const std::int64_t v_offset = (args_.kv_head_begin + head) * kv_.v.head_stride;
    const std::byte* const* next_k = next_group.k + next_block * kBlock;
    const std::int64_t next_offset = (args_.kv_head_begin + next_head) * kv_.k.head_stride;
    const std::byte* const* next_v = next_group.v + next_block * kBlock;
    const std::int64_t next_v_offset = (args_.kv_head_begin + next_head) * kv_.v.head_stride;
    for (int slab = 0; slab < w_.slabs; ++slab) {
      const bool fetch = slab == 0;
      Scores(Query(head, slab), k, k_offset, fetch ? next_k : nullptr, next_offset, k_bytes_);
      if (!map_.plain()) MapScores(group, block, head, slab);
      Softmax(head, slab);
      Weigh(Out(head, slab), v, v_offset, fetch ? next_v : nullptr, next_v_offset, v_bytes_);
    }
  }

  void AttendMasked(const Group& group, int block, int head) {
    const std::byte* const* k = group.k + block * kBlock;
    const std::byte* const* v = group.v + block * kBlock;
    const std::int64_t k_offset = (args_.kv_head_begin + head) * kv_.k.head_stride;
    const std::int64_t v_offset = (args_.kv_head_begin + head) * kv_.v.head_stride;
    const std::int64_t first = group.first_slot + block * kBlock;
    const int keys = group.KeysOf(block);
    for (int slab = 0; slab < w_.slabs; ++slab) {
      Scores(Query(head, slab), k, k_offset, nullptr, 0, 0);
      if (!map_.plain()) MapScores(group, block, head, slab);
      SlotRange seen[kSlabRows];
      for (int r = 0; r < kSlabRows; ++r) {
        const int row = slab * kSlabRows + r;
        SlotRange range{0, keys};
        if (row < w_.rows) {
          const SlotRange& visible = w_.visible[row / spec_.group()];
          range.begin = std::clamp<std::int64_t>(visible.begin - first, 0, keys);
          range.end = std::clamp<std::int64_t>(visible.end - first, range.begin, keys);
        }
        seen[r] = range;
        for (int key = 0; key < kBlock; ++key) {
          if (key < range.begin || key >= range.end) scores_[key * kSlabRows + r] = kMinusInfinity;
        }
      }
      Softmax(head, slab);
      for (int r = 0; r < kSlabRows; ++r) WeighRow(Out(head, slab), r, v, v_offset, seen[r]);
    }
  }

  // scores_[key, row] = query . key for a block.
  HWY_INLINE void Scores(const float* query, const std::byte* const* k, std::int64_t k_offset,
                         const std::byte* const* fetch, std::int64_t fetch_offset,
                         int fetch_bytes) {
    constexpr int kKeys = kTileKeys;
    const DF d;
    const int whole = spec_.head_dim / kChunk * kChunk;
    for (int key = 0; key < kBlock; key += kKeys) {
      if (fetch != nullptr) {
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) PrefetchRow(fetch[key + j] + fetch_offset, fetch_bytes);
      }
      VF sum[kKeys][kSlabRows];
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
#pragma GCC unroll 4
        for (int r = 0; r < kSlabRows; ++r) sum[j][r] = hn::Zero(d);
      }
      const std::byte* row[kKeys];
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) row[j] = k[key + j] + k_offset;
      for (int element = 0; element < whole; element += kChunk) {
        AddProducts(query + element, sum, [&](int j, bool second) HWY_ATTR {
          return Loader::Half(row[j], element, second);
        });
      }
      if (whole < spec_.head_dim) {
        AddProducts(query + whole, sum, [&](int j, bool second) HWY_ATTR {
          return Loader::HalfTail(row[j], whole, second, spec_.head_dim - whole);
        });
      }
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
        StoreSums(sum[j][0], sum[j][1], sum[j][2], sum[j][3], scores_ + (key + j) * kSlabRows);
      }
    }
  }

  // sum[key][row] += query[row] * load(key, half), over one chunk.
  template <class Load>
  HWY_INLINE void AddProducts(const float* query, VF (&sum)[kTileKeys][kSlabRows],
                              const Load& load) const {
    const DF d;
    VF x[2][kTileKeys];
#pragma GCC unroll 4
    for (int j = 0; j < kTileKeys; ++j) {
      x[0][j] = load(j, false);
      x[1][j] = load(j, true);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int r = 0; r < kSlabRows; ++r) {
        VF q = hn::Load(d, query + r * w_.qk_dim + half * kLanes);
        KeepInRegister(q);
#pragma GCC unroll 4
        for (int j = 0; j < kTileKeys; ++j) sum[j][r] = hn::MulAdd(q, x[half][j], sum[j][r]);
      }
    }
  }

  // Softcap and ALiBi.
  void MapScores(const Group& group, int block, int head, int slab) {
    const DF d;
    if (map_.has_cap) {
      for (int i = 0; i < kBlock * kSlabRows; i += kLanes) {
        const VF s = hn::Load(d, scores_ + i);
        hn::Store(hn::Mul(hn::Set(d, map_.cap), hn::Tanh(d, s)), d, scores_ + i);
      }
    }
    if (!map_.has_alibi) return;
    const int heads_per_group = spec_.group();
    for (int r = 0; r < kSlabRows; ++r) {
      const int row = slab * kSlabRows + r;
      if (row >= w_.rows) break;
      const int query_head = (args_.kv_head_begin + head) * heads_per_group + row % heads_per_group;
      const float slope = spec_.alibi_slopes[static_cast<std::size_t>(query_head)] * kLog2E;
      const std::int64_t position = task_.q_positions[row / heads_per_group];
      for (int key = 0; key < group.KeysOf(block); ++key) {
        const std::int64_t slot = group.spread > 1 ? group.first_slot + key * group.spread + block
                                                   : group.first_slot + block * kBlock + key;
        const auto distance = static_cast<float>(std::abs(position - task_.kv_positions[slot]));
        scores_[key * kSlabRows + r] -= slope * distance;
      }
    }
  }

  // scores_ become weights relative to the running maximum; the running sums grow.
  HWY_INLINE void Softmax(int head, int slab) {
    constexpr int kPeriod = kLanes < kSlabRows ? kSlabRows : kLanes;
    const DF d;
    SlabState& state = w_.state[head * w_.slabs + slab];
    bool rescale = false;
    for (int offset = 0; offset < kPeriod; offset += kLanes) {
      VF highest = hn::Load(d, scores_ + offset);
      for (int i = offset + kPeriod; i < kBlock * kSlabRows; i += kPeriod) {
        highest = hn::Max(highest, hn::Load(d, scores_ + i));
      }
      const VF limit = hn::Add(hn::Load(d, state.maximum + offset), hn::Set(d, kLag));
      rescale = rescale || !hn::AllFalse(d, hn::Gt(highest, limit));
    }
    if (HWY_UNLIKELY(rescale)) Rescale(state, Out(head, slab));
    for (int offset = 0; offset < kPeriod; offset += kLanes) {
      const VF maximum = hn::Load(d, state.maximum + offset);
      VF sum = hn::Load(d, state.sum + offset);
      for (int i = offset; i < kBlock * kSlabRows; i += kPeriod) {
        const VF p = Exp2(hn::Sub(hn::Load(d, scores_ + i), maximum));
        hn::Store(p, d, scores_ + i);
        sum = hn::Add(sum, p);
      }
      hn::Store(sum, d, state.sum + offset);
    }
  }

  // Raises each row's maximum to that of scores_ and scales what was summed under the old one.
  HWY_NOINLINE void Rescale(SlabState& state, float* out) {
    const DF d;
    constexpr int kRepeated = static_cast<int>(sizeof(state.maximum) / sizeof(float));
    for (int r = 0; r < kSlabRows; ++r) {
      float highest = state.maximum[r];
      for (int i = r; i < kBlock * kSlabRows; i += kSlabRows) {
        if (scores_[i] > highest) highest = scores_[i];
      }
      if (highest == state.maximum[r]) continue;
      const float factor = std::exp2(state.maximum[r] - highest);
      for (int i = r; i < kRepeated; i += kSlabRows) {
        state.maximum[i] = highest;
        state.sum[i] *= factor;
      }
      for (int i = 0; i < w_.v_dim; i += kLanes) {
        float* p = out + r * w_.v_dim + i;
        hn::Store(hn::Mul(hn::Load(d, p), hn::Set(d, factor)), d, p);
      }
    }
  }

  // out[row] += sum over a whole block of weight * value.
  HWY_INLINE void Weigh(float* out, const std::byte* const* v, std::int64_t v_offset,
                        const std::byte* const* fetch, std::int64_t fetch_offset, int fetch_bytes) {
    const std::byte* row[kBlock];
    for (int key = 0; key < kBlock; ++key) row[key] = v[key] + v_offset;
    const int whole = spec_.v_head_dim / kChunk * kChunk;
    int fetched = 0;
    // Fetches as large a part of the rows as the columns up to `end` are of all: a burst would fill
    // the buffers of outstanding misses and stop everything.
    const auto fetch_until = [&](int end) HWY_ATTR {
      if (fetch == nullptr) return;
      for (; fetched * spec_.v_head_dim < kBlock * end; ++fetched) {
        PrefetchRow(fetch[fetched] + fetch_offset, fetch_bytes);
      }
    };
    // Vectors come in pairs, the halves of a chunk; a register tile is kTileVectors of them.
    const int vectors = 2 * (whole / kChunk);
    int first = 0;
    for (; first + 2 * kTileVectors <= vectors; first += 2 * kTileVectors) {
      fetch_until((first + kTileVectors) * kLanes);
      WeighVectors<kTileVectors, 0>(out, first, row);
      fetch_until((first + 2 * kTileVectors) * kLanes);
      WeighVectors<kTileVectors, kTileVectors % 2>(out, first + kTileVectors, row);
    }
    for (; first < vectors; first += 2) {
      fetch_until((first + 2) * kLanes);
      WeighVectors<2, 0>(out, first, row);
    }
    if (whole < spec_.v_head_dim) {
      fetch_until(spec_.v_head_dim);
      const int count = spec_.v_head_dim - whole;
      WeighVectors<2>(out + whole, [&](int key, int i) HWY_ATTR {
        return Loader::HalfTail(row[key], whole, i == 1, count);
      });
    }
  }

  // Columns of kVectors vectors from the v-th; kFirst says which half of its chunk that is.
  template <int kVectors, int kFirst>
  HWY_INLINE void WeighVectors(float* out, int v, const std::byte* const (&row)[kBlock]) {
    const int element = v / 2 * kChunk;
    WeighVectors<kVectors>(out + v * kLanes, [&](int key, int i) HWY_ATTR {
      return Loader::Half(row[key], element + (kFirst + i) / 2 * kChunk, (kFirst + i) % 2 == 1);
    });
  }

  // out[row, 0 … kVectors) += sum over keys of weight * load(key, vector).
  template <int kVectors, class Load>
  HWY_INLINE void WeighVectors(float* out, const Load& load) {
    const DF d;
    VF sum[kSlabRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kSlabRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sum[r][i] = hn::Load(d, out + r * w_.v_dim + i * kLanes);
    }
    for (int key = 0; key < kBlock; ++key) {
      VF x[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) x[i] = load(key, i);
#pragma GCC unroll 4
      for (int r = 0; r < kSlabRows; ++r) {
        const VF weight = hn::Set(d, scores_[key * kSlabRows + r]);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) sum[r][i] = hn::MulAdd(weight, x[i], sum[r][i]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kSlabRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) hn::Store(sum[r][i], d, out + r * w_.v_dim + i * kLanes);
    }
  }

  // The same for one row and the keys that it sees: 0 * inf must not reach it.
  void WeighRow(float* slab_out, int r, const std::byte* const* v, std::int64_t v_offset,
                SlotRange keys) {
    const DF d;
    float* out = slab_out + r * w_.v_dim;
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
      const VF weight = hn::Set(d, scores_[key * kSlabRows + r]);
      for (int element = 0; element < spec_.v_head_dim; element += kChunk) {
        const int left = spec_.v_head_dim - element;
        for (int half = 0; half < 2; ++half) {
          const std::byte* row = v[key] + v_offset;
          const VF x = left >= kChunk ? Loader::Half(row, element, half == 1)
                                      : Loader::HalfTail(row, element, half == 1, left);
          float* p = out + element + half * kLanes;
          hn::Store(hn::MulAdd(weight, x, hn::Load(d, p)), d, p);
        }
      }
    }
  }

  void StoreResult() {
    const int group = spec_.group();
    constexpr int kRepeated = static_cast<int>(sizeof(SlabState::sum) / sizeof(float));
    for (int h = 0; h < heads(); ++h) {
      for (int row = 0; row < w_.rows; ++row) {
        const int slab = row / kSlabRows;
        const int r = row % kSlabRows;
        const SlabState& state = w_.state[h * w_.slabs + slab];
        float sum = 0.0f;
        for (int i = r; i < kRepeated; i += kSlabRows) sum += state.sum[i];
        const int head = (args_.kv_head_begin + h) * group + row % group;
        const auto target =
            static_cast<std::size_t>(std::int64_t{row} / group * spec_.heads + head);
        // A sum of 0 means no key, or none of any weight. A NaN is neither.
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        args_.lse[target] =
            sum == 0.0f ? kMinusInfinity : (state.maximum[r] + std::log2(sum)) * kLn2;
        const float* packed = Out(h, slab) + r * w_.v_dim;
        float* out = args_.out + target * spec_.v_head_dim;
        for (int d = 0; d < spec_.v_head_dim; ++d) out[d] = packed[Packed<Loader>(d)] * inverse;
      }
    }
  }

  float* Query(int head, int slab) const {
    return w_.query + static_cast<std::size_t>(head * w_.slabs + slab) * kSlabRows * w_.qk_dim;
  }
  float* Out(int head, int slab) const {
    return w_.out + static_cast<std::size_t>(head * w_.slabs + slab) * kSlabRows * w_.v_dim;
  }

  const DecodeArgs& args_;
  const AttentionSpec& spec_;
  const AttendTask& task_;
  const KvView& kv_;
  const ScoreMap map_;
  const Workspace w_;
  const int k_bytes_;
  const int v_bytes_;
  HWY_ALIGN float scores_[kBlock * kSlabRows];
};

}  // namespace

std::size_t DecodeWorkspace(const AttentionSpec& spec, std::int64_t tokens, int kv_heads) noexcept {
  return Workspace(spec, tokens, kv_heads, nullptr).bytes;
}

void Decode(const DecodeArgs& args) noexcept {
  switch (args.task->kv.dtype) {
    case DType::kF32:
      return Decoder<LoadF32>(args).Run();
    case DType::kBF16:
      return Decoder<LoadBF16>(args).Run();
    case DType::kF16:
      return Decoder<LoadF16>(args).Run();
    case DType::kQ8_0:
      return Decoder<LoadQ8>(args).Run();
  }
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
