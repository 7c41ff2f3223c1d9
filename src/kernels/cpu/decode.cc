// Decoding: a few query rows over many keys, at the speed of memory.
//
// All rows of a key head share one read of K and V. Keys are taken in blocks of 16; while the
// scores of a block are computed the keys of one of the next blocks are fetched, and while its
// values are weighed the values of that are. Where rows see different keys, each row weighs only
// what it sees. Queries that meet q8_0 keys, and weights, may be rounded, if the spec lets them.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/int8_slab-inl.h"
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/kv_group.h"
#include "kernels/cpu/slab-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kMaxSpread = 65;  // blocks that are interleaved
constexpr int kAhead = 2;  // blocks between the one that is computed and the one that is fetched
constexpr int kPage = 4096;

int RoundUp(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Workspace {
  Workspace(const AttentionSpec& spec, const DecodeShape& shape, std::byte* base) {
    Arena arena(base);
    rows = shape.rows;
    slabs = (rows + kSlabRows - 1) / kSlabRows;
    qk_dim = RoundUp(spec.head_dim, kChunk);  // rows that are rounded, a QueryUnit for four, fit in
    v_dim = RoundUp(spec.v_head_dim, kChunk);
    const auto head_slabs = static_cast<std::size_t>(shape.kv_heads) * slabs;
    const std::size_t all_slabs = head_slabs * shape.own_classes;
    query = arena.Take<float>(head_slabs * kSlabRows * qk_dim);
    out_values = all_slabs * kSlabRows * v_dim;
    out = arena.Take<float>(out_values);
    states = all_slabs;
    state = arena.Take<SlabState>(all_slabs);
    visible = arena.Take<SlotRange>(static_cast<std::size_t>(rows));
    row = arena.Take<float>(AttentionSpec::kMaxHeadDim);
    const std::size_t addresses = std::size_t{kBlock} * std::max(shape.classes, kMaxSpread);
    for (KvGroup& group : groups) {
      group.k = arena.Take<const std::byte*>(addresses);
      group.v = arena.Take<const std::byte*>(addresses);
    }
    bytes = arena.used();
  }

  int rows;    // of a key head
  int slabs;   // of a key head
  int qk_dim;  // padded to chunks
  int v_dim;   // padded to chunks
  float*
      query;  // [kv_head, slab, kSlabRows, qk_dim], scaled and packed; or rounded, see StoreQuery()
  float* out;  // [class, kv_head, slab, kSlabRows, v_dim], packed, not yet normalised
  std::size_t out_values;
  SlabState* state;  // [class, kv_head, slab]
  std::size_t states;
  SlotRange* visible;  // [row]
  float* row;
  KvGroup groups[2];  // the one that is computed and the one after it
  std::size_t bytes;
};

DecodeShape ShapeOf(const DecodeArgs& args) {
  return {.kv_heads = args.kv_head_end - args.kv_head_begin,
          .rows = args.row_end - args.row_begin,
          .classes = args.classes,
          .own_classes = args.class_end - args.class_begin};
}

template <class Loader>
class Decoder {
 public:
  // `bytes` may be null: then nothing is rounded.
  Decoder(const DecodeArgs& args, const int8::Multiplier* bytes)
      : args_(args),
        spec_(*args.spec),
        task_(*args.task),
        kv_(args.task->kv),
        map_(spec_),
        w_(spec_, ShapeOf(args), args.workspace),
        kernel_(spec_, w_.qk_dim, w_.v_dim),
        k_bytes_(static_cast<int>(RowBytes(kv_.dtype, spec_.head_dim))),
        v_bytes_(static_cast<int>(RowBytes(kv_.dtype, spec_.v_head_dim))),
        heads_inner_(kv_.k.head_stride < kv_.k.slot_stride) {
    if (spec_.int8_queries && Loader::kScaled) bytes_ = bytes;
  }

  void Run() {
    LoadQueries();
    if (bytes_ != nullptr) bytes_->begin();
    AttendSlots();
    if (bytes_ != nullptr) bytes_->end();
    StoreResult();
  }

 private:
  void AttendSlots() {
    // All rows see `common`; some see the rest of `any`.
    SlotRange any{args_.slots.end, args_.slots.begin};
    common_ = args_.slots;
    for (int r = 0; r < w_.rows; ++r) {
      const SlotRange& range = w_.visible[r];
      common_.begin = std::max(common_.begin, range.begin);
      common_.end = std::min(common_.end, range.end);
      if (range.size() > 0) {
        any.begin = std::min(any.begin, std::max(range.begin, args_.slots.begin));
        any.end = std::max(any.end, std::min(range.end, args_.slots.end));
      }
    }
    if (common_.size() <= 0) common_ = {any.end, any.end};
    if (args_.in_order) {
      const std::int64_t step = std::int64_t{kBlock} * args_.classes;
      Walk({any.begin / step * step, any.end}, args_.classes);
    } else {
      const std::int64_t whole = common_.size() / kBlock * kBlock;
      Walk({any.begin, common_.begin}, 1);
      Walk({common_.begin, common_.begin + whole}, Spread());
      Walk({common_.begin + whole, any.end}, 1);
    }
  }

  int heads() const { return args_.kv_head_end - args_.kv_head_begin; }
  int own_classes() const { return args_.class_end - args_.class_begin; }
  // Then a group's blocks are classes.
  bool by_class() const { return args_.classes > 1; }

  void LoadQueries() {
    const int group = spec_.group();
    const auto head_values = static_cast<std::size_t>(w_.slabs) * kSlabRows * w_.qk_dim;
    std::memset(w_.query, 0, sizeof(float) * head_values * heads());
    std::memset(w_.out, 0, sizeof(float) * w_.out_values);
    for (std::size_t i = 0; i < w_.states; ++i) w_.state[i].Clear();
    for (int r = 0; r < w_.rows; ++r) {
      const int row = args_.row_begin + r;
      w_.visible[r] = Visible(spec_, task_.q_positions[row / group], task_.kv_positions);
      for (int h = 0; h < heads(); ++h) {
        const int head = (args_.kv_head_begin + h) * group + row % group;
        WidenRow(task_.q.dtype, task_.q.Row(row / group, head), spec_.head_dim, w_.row);
        for (int d = 0; d < spec_.head_dim; ++d) w_.row[d] *= map_.query_scale;
        StoreQuery(Query(h, r / kSlabRows), r % kSlabRows);
      }
    }
  }

  // w_.row becomes a row of a slab.
  void StoreQuery(float* slab, int row) {
#if HWY_TARGET == HWY_AVX3
    if (bytes_ != nullptr) {
      auto* units = reinterpret_cast<int8::QueryUnit*>(slab);
      for (int begin = 0; begin < spec_.head_dim; begin += int8::kUnit) {
        RoundInto(units[begin / int8::kUnit], w_.row + begin,
                  std::min(int8::kUnit, spec_.head_dim - begin), row);
      }
      return;
    }
#endif
    float* packed = slab + row * w_.qk_dim;
    for (int d = 0; d < spec_.head_dim; ++d) packed[Packed<Loader>(d)] = w_.row[d];
  }

  // What can be done of a block's scores before its scales are known.
  HWY_INLINE void StartScores([[maybe_unused]] const float* slab,
                              [[maybe_unused]] const BlockRows& k) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (Loader::kScaled) {
      if (bytes_ == nullptr) return;
      bytes_slab_.Start(*bytes_, reinterpret_cast<const int8::QueryUnit*>(slab), k);
    }
#endif
  }

  // Scores of a block for a slab of queries.
  HWY_INLINE void Score(const float* slab, const BlockRows& k) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (Loader::kScaled) {
      if (bytes_ != nullptr) {
        return bytes_slab_.Finish(reinterpret_cast<const int8::QueryUnit*>(slab),
                                  kernel_.k_scales(), kernel_.scores());
      }
    }
#endif
    kernel_.Scores(slab, k);
  }

  // out[row] += sum over the first `keys` keys of weight * value, in whole numbers. False, and
  // nothing is done, where that is not how this task is computed.
  HWY_INLINE bool WeighInBytes([[maybe_unused]] const BlockRows& v, [[maybe_unused]] int keys,
                               [[maybe_unused]] float* out) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (Loader::kScaled) {
      return bytes_ != nullptr &&
             bytes_slab_.Weigh(*bytes_, kernel_.scores(), kernel_.v_scales(), v, keys, out);
    }
#endif
    return false;
  }

  // Distance in slots between neighbours in a block: just over 4 KiB, so that many DRAM pages are
  // open and rows do not fall into the same set of the first-level cache. Machines with narrower
  // vectors do better when a head's rows are read in order, if they lie in order.
  int Spread() const {
    if (!kManyRegisters && !heads_inner_) return 1;
    if (by_page() && kv_.page_slots <= kAhead * kBlock) return 1;  // too few to look ahead
    const std::int64_t stride = std::max<std::int64_t>(kv_.k.slot_stride, 1);
    return static_cast<int>(std::min<std::int64_t>(kPage / stride + 1, kMaxSpread));
  }

  // One block of one key head.
  struct Step {
    const KvGroup* group = nullptr;
    int block = 0;
    int head = 0;
  };

  // Blocks of a group that this piece takes.
  int BlocksOf(const KvGroup& group) const { return by_class() ? own_classes() : group.blocks; }

  // Where a slot's heads are neighbours, all heads read it before the next slot is touched.
  Step StepOf(const KvGroup& group, int index) const {
    const int blocks = BlocksOf(group);
    const int first = by_class() ? args_.class_begin : 0;
    if (heads_inner_) return {&group, first + index / heads(), index % heads()};
    return {&group, first + index % blocks, index / blocks};
  }

  // What is left, in as few groups as can be, of about the same size.
  static int EvenSpread(std::int64_t blocks, int spread) {
    const std::int64_t groups = (blocks + spread - 1) / spread;
    return static_cast<int>((blocks + groups - 1) / groups);
  }

  // Products of bytes read keys at even distances, as they are in a page, and copy all others.
  bool by_page() const { return bytes_ != nullptr && kv_.k.pages != nullptr; }

  // Where a group that begins at `slot` has to end, at the latest.
  std::int64_t EndOfRun(std::int64_t slot, std::int64_t end) const {
    if (!by_page()) return end;
    const std::int64_t blocks = (kv_.page_slots - slot % kv_.page_slots) / kBlock;
    return std::min(end, slot + std::max<std::int64_t>(blocks, 1) * kBlock);
  }

  std::int64_t Fill(KvGroup& group, std::int64_t slot, std::int64_t end, int spread) const {
    if (!args_.in_order && spread > 1) {
      end = EndOfRun(slot, end);
      spread = EvenSpread((end - slot) / kBlock, spread);
    }
    group.Fill(kv_, slot, end, kMaxSpread, spread);
    return slot + group.slots;
  }

  void Walk(SlotRange range, int spread) {
    if (range.size() <= 0) return;
    std::int64_t slot = Fill(w_.groups[0], range.begin, range.end, spread);
    for (int current = 0;; current ^= 1) {
      const KvGroup& group = w_.groups[current];
      KvGroup& following = w_.groups[current ^ 1];
      const bool last = slot >= range.end;
      if (!last) slot = Fill(following, slot, range.end, spread);
      const int steps = BlocksOf(group) * heads();
      const int more = last ? 0 : BlocksOf(following) * heads();
      for (int i = 0; i < steps; ++i) {
        const int ahead = i + kAhead;
        Attend(StepOf(group, i), ahead < steps          ? StepOf(group, ahead)
                                 : ahead < steps + more ? StepOf(following, ahead - steps)
                                                        : Step{});
      }
      if (last) return;
    }
  }

  // `ahead` is what to fetch meanwhile; its group may be null.
  void Attend(const Step& step, const Step& ahead) {
    const KvGroup& group = *step.group;
    const int keys = group.KeysOf(step.block);
    if (keys == 0) return;
    const std::int64_t k_offset = (args_.kv_head_begin + step.head) * kv_.k.head_stride;
    const std::int64_t v_offset = (args_.kv_head_begin + step.head) * kv_.v.head_stride;
    BlockRows k{group.k + step.block * kBlock, k_offset};
    BlockRows v{group.v + step.block * kBlock, v_offset};
    const bool whole = keys == kBlock && group.FirstSlot(step.block) >= common_.begin &&
                       group.SlotOf(step.block, kBlock - 1) < common_.end;
    if (!whole) return AttendMasked(step, k, v, keys);
    if (ahead.group != nullptr && ahead.group->KeysOf(ahead.block) == kBlock) {
      k.fetch = ahead.group->k + ahead.block * kBlock;
      k.fetch_offset = (args_.kv_head_begin + ahead.head) * kv_.k.head_stride;
      k.fetch_bytes = k_bytes_;
      v.fetch = ahead.group->v + ahead.block * kBlock;
      v.fetch_offset = (args_.kv_head_begin + ahead.head) * kv_.v.head_stride;
      v.fetch_bytes = v_bytes_;
    }
    StartScores(Query(step.head, 0), k);
    kernel_.Begin(k, v, kBlock);
    for (int slab = 0; slab < w_.slabs; ++slab) {
      const std::size_t index = SlabIndex(step, slab);
      Score(Query(step.head, slab), k);
      k.fetch = nullptr;
      if (slab + 1 < w_.slabs) StartScores(Query(step.head, slab + 1), k);
      if (!map_.plain()) MapScores(step, slab);
      kernel_.Softmax(w_.state[index], Out(index));
      if (!WeighInBytes(v, kBlock, Out(index))) kernel_.Weigh(Out(index), v);
      v.fetch = nullptr;
    }
  }

  // Rows see different keys of the block, or it is short.
  void AttendMasked(const Step& step, const BlockRows& k, const BlockRows& v, int keys) {
    const KvGroup& group = *step.group;
    const std::int64_t first = group.FirstSlot(step.block);
    // The first key at or after a slot.
    const auto key_at = [&](std::int64_t slot) {
      const std::int64_t distance = std::max<std::int64_t>(slot - first, 0);
      return std::min<std::int64_t>((distance + group.spread - 1) / group.spread, keys);
    };
    float* scores = kernel_.scores();
    StartScores(Query(step.head, 0), k);
    kernel_.Begin(k, v, keys);
    for (int slab = 0; slab < w_.slabs; ++slab) {
      const std::size_t index = SlabIndex(step, slab);
      Score(Query(step.head, slab), k);
      if (slab + 1 < w_.slabs) StartScores(Query(step.head, slab + 1), k);
      if (!map_.plain()) MapScores(step, slab);
      SlotRange seen[kSlabRows];
      for (int r = 0; r < kSlabRows; ++r) {
        const int row = slab * kSlabRows + r;
        seen[r] = {0, 0};
        if (row < w_.rows) {
          seen[r].begin = key_at(std::max(w_.visible[row].begin, args_.slots.begin));
          seen[r].end =
              std::max(seen[r].begin, key_at(std::min(w_.visible[row].end, args_.slots.end)));
        }
        for (int key = 0; key < kBlock; ++key) {
          if (key < seen[r].begin || key >= seen[r].end) {
            scores[key * kSlabRows + r] = kMinusInfinity;
          }
        }
      }
      kernel_.Softmax(w_.state[index], Out(index));
      if (WeighInBytes(v, keys, Out(index))) continue;
      for (int r = 0; r < kSlabRows; ++r) kernel_.WeighRow(Out(index), r, v, seen[r]);
    }
  }

  // Softcap and ALiBi.
  void MapScores(const Step& step, int slab) {
    const DF d;
    float* scores = kernel_.scores();
    if (map_.has_cap) {
      for (int i = 0; i < kBlock * kSlabRows; i += kLanes) {
        const VF s = hn::Load(d, scores + i);
        hn::Store(hn::Mul(hn::Set(d, map_.cap), hn::Tanh(d, s)), d, scores + i);
      }
    }
    if (!map_.has_alibi) return;
    const int group = spec_.group();
    const int keys = step.group->KeysOf(step.block);
    for (int r = 0; r < kSlabRows; ++r) {
      if (slab * kSlabRows + r >= w_.rows) break;
      const int row = args_.row_begin + slab * kSlabRows + r;
      const int query_head = (args_.kv_head_begin + step.head) * group + row % group;
      const float slope = spec_.alibi_slopes[static_cast<std::size_t>(query_head)] * kLog2E;
      const std::int64_t position = task_.q_positions[row / group];
      for (int key = 0; key < keys; ++key) {
        const std::int64_t slot = step.group->SlotOf(step.block, key);
        const auto distance = static_cast<float>(std::abs(position - task_.kv_positions[slot]));
        scores[key * kSlabRows + r] -= slope * distance;
      }
    }
  }

  void StoreResult() {
    const int group = spec_.group();
    for (int c = 0; c < own_classes(); ++c) {
      const std::size_t class_offset =
          static_cast<std::size_t>(args_.class_begin + c) * args_.class_stride;
      for (int h = 0; h < heads(); ++h) {
        for (int r = 0; r < w_.rows; ++r) {
          const std::size_t index = SlabIndex(c, h, r / kSlabRows);
          const SlabState& state = w_.state[index];
          const float sum = state.Total(r % kSlabRows);
          const int row = args_.row_begin + r;
          const int head = (args_.kv_head_begin + h) * group + row % group;
          const auto target =
              static_cast<std::size_t>(std::int64_t{row} / group * spec_.heads + head);
          // A sum of 0 means no key, or none of any weight. A NaN is neither.
          const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
          args_.lse[class_offset + target] =
              sum == 0.0f ? kMinusInfinity : (state.maximum[r % kSlabRows] + std::log2(sum)) * kLn2;
          const float* packed = Out(index) + r % kSlabRows * w_.v_dim;
          float* out = args_.out + class_offset + target * spec_.v_head_dim;
          for (int d = 0; d < spec_.v_head_dim; ++d) out[d] = packed[Packed<Loader>(d)] * inverse;
        }
      }
    }
  }

  float* Query(int head, int slab) const {
    return w_.query + static_cast<std::size_t>(head * w_.slabs + slab) * kSlabRows * w_.qk_dim;
  }
  // Of a class that counts from this piece's first.
  std::size_t SlabIndex(int own_class, int head, int slab) const {
    return (static_cast<std::size_t>(own_class) * heads() + head) * w_.slabs + slab;
  }
  std::size_t SlabIndex(const Step& step, int slab) const {
    return SlabIndex(by_class() ? step.block - args_.class_begin : 0, step.head, slab);
  }
  float* Out(std::size_t slab_index) const { return w_.out + slab_index * kSlabRows * w_.v_dim; }

  const DecodeArgs& args_;
  const AttentionSpec& spec_;
  const AttendTask& task_;
  const KvView& kv_;
  const ScoreMap map_;
  Workspace w_;
  SlabKernel<Loader> kernel_;
  const int k_bytes_;
  const int v_bytes_;
  const bool heads_inner_;
  const int8::Multiplier* bytes_ = nullptr;  // what multiplies rounded queries, if they are
#if HWY_TARGET == HWY_AVX3
  Int8Slab bytes_slab_{spec_, w_.v_dim};
#endif
  SlotRange common_;  // what all rows see
};

}  // namespace

std::size_t DecodeWorkspace(const AttentionSpec& spec, const DecodeShape& shape) noexcept {
  return Workspace(spec, shape, nullptr).bytes;
}

bool RoundsQueries() noexcept {
  return HWY_TARGET == HWY_AVX3 && int8::VnniMultiplier() != nullptr;
}

void DecodeWith(const DecodeArgs& args, const int8::Multiplier* bytes) noexcept {
  switch (args.task->kv.dtype) {
    case DType::kF32:
      return Decoder<LoadF32>(args, bytes).Run();
    case DType::kBF16:
      return Decoder<LoadBF16>(args, bytes).Run();
    case DType::kF16:
      return Decoder<LoadF16>(args, bytes).Run();
    case DType::kQ8_0:
      return Decoder<LoadQ8>(args, bytes).Run();
  }
}

void Decode(const DecodeArgs& args) noexcept {
  DecodeWith(args, RoundsQueries() ? int8::VnniMultiplier() : nullptr);
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
