// Forward attention of a block of query rows, tiled, with an online softmax.
//
// Lanes are query rows throughout: scores are computed transposed, [key, row], and so is the
// output, [dim, row]. Then K and V are used as they lie (their elements are broadcast), maxima and
// sums need no horizontal step, and no head dim needs special care. A panel is the rows that fit
// one register tile; its scores of one key tile stay in the first-level cache.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forward.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/forward_rows.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kKeyTile = 128;
constexpr int kAhead = 8;                          // rows that are fetched before they are needed
constexpr int kTileRows = kManyRegisters ? 8 : 4;  // keys, or dims, of a register tile
constexpr int kTileVectors = kLanes == 1 ? 4 : 3;  // panels are packed four rows at a time
constexpr int kPanel = kTileVectors * kLanes;      // query rows of a panel
constexpr int kMaxRows = 384;                      // of a block
constexpr int kPanels = kMaxRows / kPanel;
static_assert(kMaxRows % kPanel == 0 && kPanel % 4 == 0 && kKeyTile % kTileRows == 0);

int BlockRows(const AttentionSpec& spec) {
  return spec.head_dim <= 256 && spec.v_head_dim <= 256 ? kMaxRows : kMaxRows / 2;
}

struct Workspace {
  Workspace(const AttentionSpec& spec, std::byte* base) : Workspace(spec, Arena(base)) {}
  Workspace(const AttentionSpec& spec, Arena arena) : rows(arena, kMaxRows) {
    const auto block = static_cast<std::size_t>(BlockRows(spec));
    query = arena.Take<float>(block * spec.head_dim);
    out = arena.Take<float>(block * spec.v_head_dim);
    keys = arena.Take<float>(std::size_t{kKeyTile} * spec.head_dim);
    v_row = RowStride(spec.v_head_dim);
    values = arena.Take<float>(std::size_t{kKeyTile} * v_row);
    scores = arena.Take<float>(std::size_t{kKeyTile} * kPanel);
    four_rows = arena.Take<float>(std::size_t{4} * spec.head_dim);
    maximum = arena.Take<float>(kMaxRows);
    sum = arena.Take<float>(kMaxRows);
    tile_begin = arena.Take<std::int32_t>(kPanel);
    tile_end = arena.Take<std::int32_t>(kPanel);
    row_offset = arena.Take<float>(kPanel);
    key_position = arena.Take<std::int64_t>(kKeyTile);
    bytes = arena.used();
  }

  ForwardRows rows;
  float* query;              // [panel, head_dim, kPanel], scaled
  float* out;                // [panel, v_head_dim, kPanel], not yet normalised
  float* keys;               // [kKeyTile, head_dim]
  int v_row;                 // from row to row of values
  float* values;             // [kKeyTile, v_row]
  float* scores;             // [kKeyTile, kPanel]
  float* four_rows;          // queries, widened, on their way to a panel
  float* maximum;            // [row], log2 domain, may lag
  float* sum;                // [row]
  std::int32_t* tile_begin;  // visible, relative to the tile, of one panel
  std::int32_t* tile_end;
  float* row_offset;           // position relative to the tile's first key, of one panel
  std::int64_t* key_position;  // of one tile
  std::size_t bytes;
};

class Block {
 public:
  explicit Block(const ForwardArgs& args)
      : args_(args),
        spec_(*args.spec),
        task_(*args.task),
        map_(spec_),
        w_(spec_, args.workspace),
        k_bytes_(static_cast<int>(RowBytes(task_.kv.dtype, spec_.head_dim))),
        v_bytes_(static_cast<int>(RowBytes(task_.kv.dtype, spec_.v_head_dim))),
        panels_((args.rows + kPanel - 1) / kPanel) {}

  void Run() {
    LoadQueries();
    Reach reach;
    for (int p = 0; p < panels_; ++p) {
      panel_reach_[p] = w_.rows.ReachOf(p * kPanel, kPanel);
      reach.Widen(panel_reach_[p]);
    }
    for (std::int64_t slot = reach.first; slot < reach.last; slot += kKeyTile) {
      const int keys = static_cast<int>(std::min<std::int64_t>(kKeyTile, reach.last - slot));
      LoadTile(slot, keys);
      for (int p = 0; p < panels_; ++p) AttendTile(p, slot, keys);
    }
    StoreResult();
  }

 private:
  void LoadQueries() {
    w_.rows.Load(spec_, task_, args_.kv_head, args_.row_begin, args_.rows, panels_ * kPanel);
    for (int i = 0; i < panels_ * kPanel; ++i) {
      WidenRow(task_.q.dtype, task_.q.Row(w_.rows.token[i], w_.rows.head[i]), spec_.head_dim,
               w_.four_rows + i % 4 * spec_.head_dim);
      if (i % 4 == 3) {
        TransposeFourRows(w_.four_rows, spec_.head_dim, spec_.head_dim, map_.query_scale,
                          Query(i / kPanel) + (i - 3) % kPanel, kPanel);
      }
      w_.maximum[i] = kNoScore;
      w_.sum[i] = 0.0f;
    }
    std::memset(w_.out, 0, sizeof(float) * panels_ * kPanel * spec_.v_head_dim);
    std::memset(w_.values, 0, sizeof(float) * kKeyTile * w_.v_row);  // what is between rows stays
  }

  void LoadTile(std::int64_t slot, int keys) {
    for (int j = 0; j < keys; ++j) {
      if (j + kAhead < keys) {  // rows of one head lie far apart: no hardware fetches them
        PrefetchRow(task_.kv.KeyRow(slot + j + kAhead, args_.kv_head), k_bytes_);
        PrefetchRow(task_.kv.ValueRow(slot + j + kAhead, args_.kv_head), v_bytes_);
      }
      WidenRow(task_.kv.dtype, task_.kv.KeyRow(slot + j, args_.kv_head), spec_.head_dim,
               w_.keys + j * spec_.head_dim);
      WidenRow(task_.kv.dtype, task_.kv.ValueRow(slot + j, args_.kv_head), spec_.v_head_dim,
               w_.values + j * w_.v_row);
    }
    // A register tile may reach past the last key; its scores are not used.
    const int padded = (keys + kTileRows - 1) / kTileRows * kTileRows;
    std::memset(w_.keys + keys * spec_.head_dim, 0,
                sizeof(float) * (padded - keys) * spec_.head_dim);
    values_finite_ = AllFinite(w_.values, static_cast<std::size_t>(keys) * w_.v_row);
    if (map_.has_alibi) {
      task_.kv_positions.Fill(slot, {w_.key_position, static_cast<std::size_t>(keys)});
    }
  }

  HWY_NOINLINE void AttendTile(int panel, std::int64_t slot, int keys) {
    const Reach& reach = panel_reach_[panel];
    const int begin = static_cast<int>(std::clamp<std::int64_t>(reach.first - slot, 0, keys));
    const int end = static_cast<int>(std::clamp<std::int64_t>(reach.last - slot, 0, keys));
    if (begin >= end) return;
    const int aligned_begin = begin / kTileRows * kTileRows;
    const float* query = Query(panel);
    for (int j = aligned_begin; j < end; j += kTileRows) {
      Multiply<kTileRows, kTileVectors, false>(w_.keys + j * spec_.head_dim, spec_.head_dim, 1,
                                               query, kPanel, spec_.head_dim,
                                               w_.scores + j * kPanel, kPanel);
    }
    const bool full = reach.common_begin <= slot + begin && reach.common_end >= slot + end;
    if (!full) {
      for (int i = 0; i < kPanel; ++i) {
        const SlotRange& range = w_.rows.visible[panel * kPanel + i];
        w_.tile_begin[i] =
            static_cast<std::int32_t>(std::clamp<std::int64_t>(range.begin - slot, 0, kKeyTile));
        w_.tile_end[i] =
            static_cast<std::int32_t>(std::clamp<std::int64_t>(range.end - slot, 0, kKeyTile));
      }
    }
    if (!map_.plain()) MapScores(panel, begin, end);
    if (full) {
      Softmax<false>(panel, begin, end);
    } else {
      Softmax<true>(panel, begin, end);
    }
    if (full || values_finite_) {
      for (int d = 0; d < spec_.v_head_dim; d += kTileRows) {
        Multiply<kTileRows, kTileVectors, true>(
            w_.values + begin * w_.v_row + d, 1, w_.v_row, w_.scores + begin * kPanel, kPanel,
            static_cast<std::size_t>(end - begin), Out(panel) + d * kPanel, kPanel);
      }
    } else {
      WeighVisible(panel, begin, end);
    }
  }

  // Softcap and ALiBi.
  void MapScores(int panel, int begin, int end) {
    const DF d;
    if (map_.has_alibi) {
      for (int i = 0; i < kPanel; ++i) {
        w_.row_offset[i] =
            static_cast<float>(w_.rows.position[panel * kPanel + i] - w_.key_position[begin]);
      }
    }
    for (int j = begin; j < end; ++j) {
      const VF key_offset = hn::Set(
          d,
          map_.has_alibi ? static_cast<float>(w_.key_position[j] - w_.key_position[begin]) : 0.0f);
      for (int i = 0; i < kPanel; i += kLanes) {
        VF s = hn::Load(d, w_.scores + j * kPanel + i);
        if (map_.has_cap) s = hn::Mul(hn::Set(d, map_.cap), hn::Tanh(d, s));
        if (map_.has_alibi) {
          const VF distance = hn::Abs(hn::Sub(hn::Load(d, w_.row_offset + i), key_offset));
          s = hn::NegMulAdd(hn::Load(d, w_.rows.slope + panel * kPanel + i), distance, s);
        }
        hn::Store(s, d, w_.scores + j * kPanel + i);
      }
    }
  }

  // Scores become weights relative to the running maximum; the running sums grow.
  template <bool kMasked>
  void Softmax(int panel, int begin, int end) {
    const DF d;
    const hn::RebindToSigned<DF> di;
    float* maximum = w_.maximum + panel * kPanel;
    float* sum = w_.sum + panel * kPanel;
    bool rescale = false;
    VF highest[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) highest[v] = hn::Set(d, kNoScore);
    for (int j = begin; j < end; ++j) {
      float* scores = w_.scores + j * kPanel;
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        VF s = hn::Load(d, scores + v * kLanes);
        if constexpr (kMasked) {
          const auto key = hn::Set(di, j);
          const auto visible = hn::AndNot(hn::Lt(key, hn::Load(di, w_.tile_begin + v * kLanes)),
                                          hn::Lt(key, hn::Load(di, w_.tile_end + v * kLanes)));
          s = hn::IfThenElse(hn::RebindMask(d, visible), s, hn::Set(d, kMinusInfinity));
          hn::Store(s, d, scores + v * kLanes);
        }
        highest[v] = hn::Max(highest[v], s);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      const VF limit = hn::Add(hn::Load(d, maximum + v * kLanes), hn::Set(d, kLag));
      rescale = rescale || !hn::AllFalse(d, hn::Gt(highest[v], limit));
    }
    if (HWY_UNLIKELY(rescale)) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) Rescale(panel, v * kLanes, highest[v]);
    }
    VF top[kTileVectors];
    VF total[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      top[v] = hn::Load(d, maximum + v * kLanes);
      total[v] = hn::Load(d, sum + v * kLanes);
    }
    for (int j = begin; j < end; ++j) {
      float* scores = w_.scores + j * kPanel;
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        const VF p = Exp2(hn::Sub(hn::Load(d, scores + v * kLanes), top[v]));
        hn::Store(p, d, scores + v * kLanes);
        total[v] = hn::Add(total[v], p);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) hn::Store(total[v], d, sum + v * kLanes);
  }

  // Raises the maxima of one vector of rows and scales what was summed under the old ones.
  void Rescale(int panel, int offset, VF highest) {
    const DF d;
    float* maximum = w_.maximum + panel * kPanel + offset;
    float* sum = w_.sum + panel * kPanel + offset;
    const VF old = hn::Load(d, maximum);
    const VF raised = hn::IfThenElse(hn::Gt(highest, old), highest, old);
    const VF factor = Exp2(hn::Sub(old, raised));
    hn::Store(raised, d, maximum);
    hn::Store(hn::Mul(hn::Load(d, sum), factor), d, sum);
    for (int dim = 0; dim < spec_.v_head_dim; ++dim) {
      float* out = Out(panel) + dim * kPanel + offset;
      hn::Store(hn::Mul(hn::Load(d, out), factor), d, out);
    }
  }

  // The product with V, skipping what a row does not see: 0 * inf must not reach it.
  void WeighVisible(int panel, int begin, int end) {
    for (int i = 0; i < kPanel; ++i) {
      const int row_begin = std::max(begin, w_.tile_begin[i]);
      const int row_end = std::min(end, w_.tile_end[i]);
      for (int j = row_begin; j < row_end; ++j) {
        const float weight = w_.scores[j * kPanel + i];
        for (int d = 0; d < spec_.v_head_dim; ++d) {
          Out(panel)[d * kPanel + i] += weight * w_.values[j * w_.v_row + d];
        }
      }
    }
  }

  void StoreResult() {
    for (int i = 0; i < args_.rows; ++i) {
      const RowEnd end(w_.maximum[i], w_.sum[i]);
      const std::size_t target = w_.rows.Target(spec_, i);
      task_.result.lse[target] = end.lse;
      float* out = task_.result.out.data() + target * spec_.v_head_dim;
      const float* column = Out(i / kPanel) + i % kPanel;
      for (int d = 0; d < spec_.v_head_dim; ++d) out[d] = column[d * kPanel] * end.factor;
    }
  }

  float* Query(int panel) const { return w_.query + panel * kPanel * spec_.head_dim; }
  float* Out(int panel) const { return w_.out + panel * kPanel * spec_.v_head_dim; }

  const ForwardArgs& args_;
  const AttentionSpec& spec_;
  const AttendTask& task_;
  const ScoreMap map_;
  const Workspace w_;
  const int k_bytes_;  // of a row
  const int v_bytes_;
  const int panels_;
  Reach panel_reach_[kPanels];
  bool values_finite_ = true;
};

}  // namespace

ForwardBlock BlockOfForward(const AttentionSpec& spec, const AttendTask& /*task*/) noexcept {
  return {BlockRows(spec), Workspace(spec, nullptr).bytes};
}

void Forward(const ForwardArgs& args) noexcept { Block(args).Run(); }

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
