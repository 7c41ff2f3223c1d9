// Forward attention in bf16: both products by a machine's matrix instructions, sums and softmax in
// f32, weights rounded to bf16.
//
// Queries and keys may be sums of two bf16 numbers, high and low; then their product is that of
// both high terms, and those of a low and a high one.
//
// A strip is 32 query rows, the side of a product. Its way through a tile of keys has three steps:
// scores, softmax, values. The steps of three strips run a part at a time by turns, so that matrix
// and vector units work at once:
//
//   scores of strip i + 1  |  softmax of strip i  |  values of strip i - 1

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/bf16/forward.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "kernels/cpu/bf16/kernels-inl.h"
#include "kernels/cpu/bf16/pack-inl.h"
#include "kernels/cpu/forward_rows.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kKeyTile = 256;
constexpr int kKeyGroups = kKeyTile / kSide;
constexpr int kParts = kSide / 2;  // of a step: two rows of softmax each
constexpr int kMaxRows = 768;      // of a block
constexpr int kMaxStrips = kMaxRows / kSide;
static_assert(kParts % kKeyGroups == 0 && kMaxRows / 4 % kSide == 0);

int BlockRows(const AttentionSpec& spec) {
  const int dim = std::max(spec.head_dim, spec.v_head_dim);
  return dim <= 128 ? kMaxRows : dim <= 256 ? kMaxRows / 2 : kMaxRows / 4;
}

// Of queries and keys.
int Terms(const AttentionSpec& spec, const AttendTask& task) {
  const bool exact = task.q.dtype == DType::kBF16 && task.kv.dtype == DType::kBF16;
  return exact ? 1 : spec.bf16_terms;
}

struct Workspace {
  Workspace(const AttentionSpec& spec, int terms, std::byte* base)
      : Workspace(spec, terms, BlockRows(spec), Arena(base)) {}
  Workspace(const AttentionSpec& spec, int terms, std::size_t most, Arena arena)
      : rows(arena, most) {
    qk_dim = RoundUp(spec.head_dim, kDepth);
    qk_row = qk_dim * terms;
    v_dim = RoundUp(spec.v_head_dim, kSide);
    query = arena.Take<Bits>(most * qk_row);
    keys = arena.Take<Bits>(std::size_t{kKeyTile} * qk_row);
    values = arena.Take<Bits>(std::size_t{kKeyTile} * v_dim);
    out = arena.Take<float>(most * v_dim);
    for (int i = 0; i < 2; ++i) {
      scores[i] = arena.Take<float>(std::size_t{kSide} * kKeyTile);
      weights[i] = arena.Take<Bits>(std::size_t{kSide} * kKeyTile);
    }
    zeros = arena.Take<Bits>(AttentionSpec::kMaxHeadDim);
    rounded_k = arena.Take<Bits>(std::size_t{kSide} * qk_row);
    rounded_v = arena.Take<Bits>(std::size_t{kSide} * v_dim);
    maximum = arena.Take<float>(most);
    sum = arena.Take<float>(most * kLanes);
    key_offset = arena.Take<float>(kKeyTile);
    row = arena.Take<float>(AttentionSpec::kMaxHeadDim);
    bytes = arena.used();
  }

  ForwardRows rows;
  int qk_dim;         // padded to the depth of a step
  int qk_row;         // all terms of a row
  int v_dim;          // padded to the side of a product
  Bits* query;        // [row, term, qk_dim]: the low term, if there is one, then the high one
  Bits* keys;         // tiles [key / 16, term, qk_dim / 32]: first the high term
  Bits* values;       // tiles [key / 32, v_dim / 16]
  float* out;         // [row, v_dim], not yet normalised
  float* scores[2];   // [kSide, kKeyTile]: products, then scores in the log2 domain
  Bits* weights[2];   // [kSide, kKeyTile]
  Bits* zeros;        // a row of keys beyond the last
  Bits* rounded_k;    // [term, kSide, qk_dim]: rows that are not bf16 in memory
  Bits* rounded_v;    // [kSide, v_dim]
  float* maximum;     // [row], log2 domain, may lag
  float* sum;         // [row, kLanes]
  float* key_offset;  // [key], position relative to the tile's first
  float* row;         // a row, widened
  std::size_t bytes;
};

class Block {
 public:
  Block(const ForwardArgs& args, const bf16::Multiplier& multiplier)
      : args_(args),
        multiplier_(multiplier),
        spec_(*args.spec),
        task_(*args.task),
        map_(spec_),
        terms_(Terms(spec_, task_)),
        w_(spec_, terms_, args.workspace),
        strips_((args.rows + kSide - 1) / kSide),
        k_bytes_(static_cast<int>(RowBytes(task_.kv.dtype, spec_.head_dim))),
        v_bytes_(static_cast<int>(RowBytes(task_.kv.dtype, spec_.v_head_dim))) {}

  void Run() {
    LoadQueries();
    Reach all;
    for (int s = 0; s < strips_; ++s) {
      reach_[s] = w_.rows.ReachOf(s * kSide, kSide);
      all.Widen(reach_[s]);
    }
    multiplier_.begin();
    for (std::int64_t slot = all.first; slot < all.last; slot += kKeyTile) {
      LoadTile(slot, static_cast<int>(std::min<std::int64_t>(kKeyTile, all.last - slot)));
      fetched_ = slot + kKeyTile;
      fetch_end_ = std::min(slot + 2 * kKeyTile, all.last);
      AttendTile(slot);
    }
    multiplier_.end();
    StoreResult();
  }

 private:
  void LoadQueries() {
    w_.rows.Load(spec_, task_, args_.kv_head, args_.row_begin, args_.rows, strips_ * kSide);
    std::memset(w_.query, 0, sizeof(Bits) * strips_ * kSide * w_.qk_row);
    for (int i = 0; i < args_.rows; ++i) {
      const std::byte* row = task_.q.Row(w_.rows.token[i], w_.rows.head[i]);
      Bits* target = w_.query + i * w_.qk_row;
      if (terms_ == 2) {
        WidenRow(task_.q.dtype, row, spec_.head_dim, w_.row);
        SplitRow(w_.row, spec_.head_dim, target + w_.qk_dim, target);
      } else {
        const Bits* bits = InBf16(task_.q.dtype, row, spec_.head_dim, target);
        std::memmove(target, bits, sizeof(Bits) * spec_.head_dim);
      }
    }
    const int rows = strips_ * kSide;
    std::memset(w_.out, 0, sizeof(float) * rows * w_.v_dim);
    std::memset(w_.sum, 0, sizeof(float) * rows * kLanes);
    std::fill_n(w_.maximum, rows, kNoScore);
    std::memset(w_.zeros, 0, sizeof(Bits) * AttentionSpec::kMaxHeadDim);
  }

  // A row of any type: where it lies, if it is bf16 there; otherwise rounded, in `target`.
  const Bits* InBf16(DType dtype, const std::byte* row, int dim, Bits* target) const {
    if (dtype == DType::kBF16) return reinterpret_cast<const Bits*>(row);
    WidenRow(dtype, row, dim, w_.row);
    RoundRow(w_.row, dim, target);
    return target;
  }

  void LoadTile(std::int64_t slot, int keys) {
    const int groups = (keys + kSide - 1) / kSide;
    values_finite_ = true;
    for (int g = 0; g < groups; ++g) {
      const Bits* k[AttentionSpec::kMaxBf16Terms][kSide];
      const Bits* v[kSide];
      for (int j = 0; j < kSide; ++j) {
        const std::int64_t key = slot + g * kSide + j;
        k[0][j] = k[1][j] = v[j] = w_.zeros;
        if (g * kSide + j >= keys) continue;
        LoadKey(key, w_.rounded_k + j * w_.qk_dim, k[0][j], k[1][j]);
        v[j] = InBf16(task_.kv.dtype, task_.kv.ValueRow(key, args_.kv_head), spec_.v_head_dim,
                      w_.rounded_v + j * w_.v_dim);
        values_finite_ = values_finite_ && AllFiniteBits(v[j], spec_.v_head_dim);
      }
      for (int term = 0; term < terms_; ++term) {
        for (int half = 0; half < kSide; half += kTileRows) {
          PackColumns(k[term] + half, spec_.head_dim,
                      w_.keys + (g * kSide + half) * w_.qk_row + term * kTileRows * w_.qk_dim);
        }
      }
      PackRows(v, spec_.v_head_dim, w_.values + g * kSide * w_.v_dim);
    }
    if (map_.has_alibi) {
      const std::int64_t first = task_.kv_positions[slot];
      for (int j = 0; j < keys; ++j) {
        w_.key_offset[j] = static_cast<float>(task_.kv_positions[slot + j] - first);
      }
    }
  }

  // The terms of a key. What is not bf16 in memory is made so in `rounded`, kSide rows apart.
  HWY_INLINE void LoadKey(std::int64_t key, Bits* rounded, const Bits*& high, const Bits*& low) {
    const std::byte* row = task_.kv.KeyRow(key, args_.kv_head);
    if (terms_ == 1) {
      high = InBf16(task_.kv.dtype, row, spec_.head_dim, rounded);
      return;
    }
    WidenRow(task_.kv.dtype, row, spec_.head_dim, w_.row);
    SplitRow(w_.row, spec_.head_dim, rounded, rounded + kSide * w_.qk_dim);
    high = rounded;
    low = rounded + kSide * w_.qk_dim;
  }

  // One strip's way through a tile of keys.
  struct Step {
    int strip = 0;
    int groups = 0;  // of 32 keys that any row sees
    bool full = true;
    float* scores = nullptr;
    Bits* weights = nullptr;
  };

  void AttendTile(std::int64_t slot) {
    slot_ = slot;
    Step steps[kMaxStrips];
    int count = 0;
    for (int s = 0; s < strips_; ++s) {
      const std::int64_t end = std::min(reach_[s].last, slot + kKeyTile);
      if (reach_[s].first >= slot + kKeyTile || end <= slot) continue;
      const int groups = static_cast<int>((end - slot + kSide - 1) / kSide);
      const bool full = reach_[s].common_begin <= slot &&
                        reach_[s].common_end >= slot + std::int64_t{groups} * kSide;
      steps[count] = {s, groups, full, w_.scores[count % 2], w_.weights[count % 2]};
      ++count;
    }
    const int fetches = kKeyTile / (count + 2) / kParts + 1;
    for (int i = -1; i <= count; ++i) {
      for (int part = 0; part < kParts; ++part) {
        FetchAhead(fetches);
        if (i + 1 < count) Scores(steps[i + 1], part);
        if (i >= 0 && i < count) Softmax(steps[i], 2 * part);
        if (i >= 1) Values(steps[i - 1], part);
      }
    }
  }

  // Some rows of the next tile: those of one head lie far apart, and no hardware fetches them.
  void FetchAhead(int keys) {
    for (const std::int64_t end = std::min(fetched_ + keys, fetch_end_); fetched_ < end;
         ++fetched_) {
      PrefetchRow(task_.kv.KeyRow(fetched_, args_.kv_head), k_bytes_);
      PrefetchRow(task_.kv.ValueRow(fetched_, args_.kv_head), v_bytes_);
    }
  }

  void Scores(const Step& step, int part) {
    constexpr int kEvery = kParts / kKeyGroups;
    const int group = part / kEvery;
    if (part % kEvery != 0 || group >= step.groups) return;
    const Bits* query = w_.query + step.strip * kSide * w_.qk_row;
    bf16::Product product{.a = query,
                          .a_row = w_.qk_row,
                          .a_step = kDepth,
                          .b = w_.keys + group * kSide * w_.qk_row,
                          .b_column = std::int64_t{kTileRows} * w_.qk_row,
                          .b_step = kTileSize,
                          .steps = w_.qk_row / kDepth,
                          .c = step.scores + group * kSide,
                          .c_row = kKeyTile,
                          .add = false};
    if (terms_ == 2) {
      // Low queries with high keys and high ones with low keys: small terms first. An infinity of a
      // key or query makes all its scores NaN here, since it meets terms of either sign.
      multiplier_.multiply(product);
      product.add = true;
      product.a = query + w_.qk_dim;
      product.steps = w_.qk_dim / kDepth;
    }
    multiplier_.multiply(product);
  }

  void Values(const Step& step, int part) {
    if (!step.full && !values_finite_) {
      if (part == 0) WeighVisible(step);
      return;
    }
    const int columns = w_.v_dim / kSide;
    for (int c = columns * part / kParts; c < columns * (part + 1) / kParts; ++c) {
      multiplier_.multiply({.a = step.weights,
                            .a_row = kKeyTile,
                            .a_step = kDepth,
                            .b = w_.values + c * 2 * kTileSize,
                            .b_column = kTileSize,
                            .b_step = std::int64_t{kTileRows} * 2 * w_.v_dim,
                            .steps = step.groups,
                            .c = w_.out + step.strip * kSide * w_.v_dim + c * kSide,
                            .c_row = w_.v_dim,
                            .add = true});
    }
  }

  // Two rows from `first` on.
  void Softmax(const Step& step, int first) {
    for (int r = first; r < first + 2; ++r) {
      if (step.full && map_.plain() && map_.query_scale > 0.0f) {
        SoftmaxRow(step, r, map_.query_scale);
      } else {
        MapRow(step, r);
        SoftmaxRow(step, r, 1.0f);
      }
    }
  }

  // Products become scores: softcap, ALiBi, and -inf where the row does not see the key.
  void MapRow(const Step& step, int r) {
    const DF d;
    const hn::RebindToSigned<DF> di;
    const int i = step.strip * kSide + r;
    const auto key = [&](std::int64_t slot) HWY_ATTR {
      return hn::Set(
          di, static_cast<std::int32_t>(std::clamp<std::int64_t>(slot - slot_, 0, kKeyTile)));
    };
    const auto begin = key(w_.rows.visible[i].begin);
    const auto end = key(w_.rows.visible[i].end);
    const VF scale = hn::Set(d, map_.query_scale);
    const VF slope = hn::Set(d, w_.rows.slope[i]);
    const VF offset = hn::Set(
        d, map_.has_alibi ? static_cast<float>(w_.rows.position[i] - task_.kv_positions[slot_])
                          : 0.0f);
    float* scores = step.scores + r * kKeyTile;
    for (int j = 0; j < step.groups * kSide; j += kLanes) {
      VF s = hn::Mul(hn::Load(d, scores + j), scale);
      if (map_.has_cap) s = hn::Mul(hn::Set(d, map_.cap), hn::Tanh(d, s));
      if (map_.has_alibi) {
        const VF distance = hn::Abs(hn::Sub(offset, hn::Load(d, w_.key_offset + j)));
        s = hn::NegMulAdd(slope, distance, s);
      }
      const auto at = hn::Iota(di, j);
      const auto seen = hn::AndNot(hn::Lt(at, begin), hn::Lt(at, end));
      s = hn::IfThenElse(hn::RebindMask(d, seen), s, hn::Set(d, kMinusInfinity));
      hn::Store(s, d, scores + j);
    }
  }

  // Scores times `factor`, which is positive, become weights relative to the running maximum, in
  // the order of PairedRow; the running sum grows. A NaN among them is one in the sum, and so in
  // all of the row's result.
  HWY_INLINE void SoftmaxRow(const Step& step, int r, float factor) {
    const DF d;
    const DU du;
    const int i = step.strip * kSide + r;
    const float* scores = step.scores + r * kKeyTile;
    auto* weights = reinterpret_cast<std::uint32_t*>(step.weights + r * kKeyTile);
    const int keys = step.groups * kSide;
    const VF scale = hn::Set(d, factor);
    VF highest = hn::Load(d, scores);
    VF highest_odd = hn::Load(d, scores + kLanes);
    for (int j = kSide; j < keys; j += kSide) {
      highest = hn::Max(highest, hn::Load(d, scores + j));
      highest_odd = hn::Max(highest_odd, hn::Load(d, scores + j + kLanes));
    }
    highest = hn::Mul(hn::Max(highest, highest_odd), scale);
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::Gt(highest, hn::Set(d, w_.maximum[i] + kLag))))) {
      Rescale(i, hn::GetLane(hn::MaxOfLanes(d, highest)));
    }
    const VF top = hn::Set(d, w_.maximum[i]);
    VF even = hn::Load(d, w_.sum + i * kLanes);
    VF odd = hn::Zero(d);
    for (int j = 0; j < keys; j += kSide) {
      const VF a = Exp2ForBf16(hn::MulSub(hn::Load(d, scores + j), scale, top));
      const VF b = Exp2ForBf16(hn::MulSub(hn::Load(d, scores + j + kLanes), scale, top));
      even = hn::Add(even, a);
      odd = hn::Add(odd, b);
      hn::Store(RoundPairs(a, b), du, weights + j / 2);
    }
    hn::Store(hn::Add(even, odd), d, w_.sum + i * kLanes);
  }

  // Raises a row's maximum and scales what was summed under the old one.
  HWY_NOINLINE void Rescale(int i, float highest) {
    const DF d;
    const VF factor = hn::Set(d, std::exp2(w_.maximum[i] - highest));
    w_.maximum[i] = highest;
    hn::Store(hn::Mul(hn::Load(d, w_.sum + i * kLanes), factor), d, w_.sum + i * kLanes);
    float* out = w_.out + i * w_.v_dim;
    for (int k = 0; k < w_.v_dim; k += kLanes) {
      hn::Store(hn::Mul(hn::Load(d, out + k), factor), d, out + k);
    }
  }

  // The product with V, skipping what a row does not see: 0 * inf must not reach it.
  void WeighVisible(const Step& step) {
    for (int j = 0; j < step.groups * kSide; ++j) {
      const std::int64_t slot = slot_ + j;
      bool loaded = false;
      for (int r = 0; r < kSide; ++r) {
        const int i = step.strip * kSide + r;
        if (slot < w_.rows.visible[i].begin || slot >= w_.rows.visible[i].end) continue;
        if (!loaded) {
          WidenRow(task_.kv.dtype, task_.kv.ValueRow(slot, args_.kv_head), spec_.v_head_dim,
                   w_.row);
          loaded = true;
        }
        const int place = j / kSide * kSide + PairedPlace(j % kSide);
        const float weight = F32FromBF16(step.weights[r * kKeyTile + place]);
        float* out = w_.out + i * w_.v_dim;
        for (int k = 0; k < spec_.v_head_dim; ++k) out[k] += weight * w_.row[k];
      }
    }
  }

  void StoreResult() {
    const DF d;
    for (int i = 0; i < args_.rows; ++i) {
      const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, w_.sum + i * kLanes)));
      const RowEnd end(w_.maximum[i], sum);
      const std::size_t target = w_.rows.Target(spec_, i);
      task_.result.lse[target] = end.lse;
      float* out = task_.result.out.data() + target * spec_.v_head_dim;
      const float* from = w_.out + i * w_.v_dim;
      for (int k = 0; k < spec_.v_head_dim; ++k) out[k] = from[k] * end.factor;
    }
  }

  const ForwardArgs& args_;
  const bf16::Multiplier& multiplier_;
  const AttentionSpec& spec_;
  const AttendTask& task_;
  const ScoreMap map_;
  const int terms_;
  const Workspace w_;
  const int strips_;
  const int k_bytes_;  // of a row
  const int v_bytes_;
  std::int64_t slot_ = 0;     // of the tile's first key
  std::int64_t fetched_ = 0;  // rows before this one are, or are on their way
  std::int64_t fetch_end_ = 0;
  Reach reach_[kMaxStrips];
  bool values_finite_ = true;  // those of the tile
};

}  // namespace

ForwardBlock BlockOfBf16Forward(const AttentionSpec& spec, const AttendTask& task) noexcept {
  return {BlockRows(spec), Workspace(spec, Terms(spec, task), nullptr).bytes};
}

void Bf16Forward(const ForwardArgs& args, const bf16::Multiplier& multiplier) noexcept {
  Block(args, multiplier).Run();
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
