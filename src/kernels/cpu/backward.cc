// Gradients of a block of keys, over all query rows that see it.
//
// Scores and their gradients are computed transposed, [key, row], so that both are operands of the
// later products as they lie:
//   S^T = K Q^T      dP^T = V dO^T      P = exp(S - lse)      dS = P (dP - dO.O)
//   dV += P^T dO     dK += dS^T Q       dQ += dS K
// Everything is recomputed from q, k, v, out and lse; nothing of size rows x keys outlives a block.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/backward.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/backward_rows.h"
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/turns.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kTileRows = kManyRegisters ? 8 : 6;
constexpr int kTileVectors = kLanes == 1 ? 4 : kManyRegisters ? 3 : 2;
constexpr int kPanel = kTileVectors * kLanes;  // query rows of a panel
// Query rows of a block: the tiles of a block then fit the second-level cache.
constexpr int kRows = 96;
constexpr int kKeys = 192;  // of a block
// Elements of a sum that are added in one go: what they are multiplied with then stays in the
// first-level cache for all rows.
constexpr std::size_t kDepth = 96;
constexpr int kAhead = 8;  // rows that are fetched before they are needed
static_assert(kRows % kPanel == 0 && kPanel % 4 == 0 && kRows % kTileRows == 0 &&
              kKeys % kTileRows == 0);

int RoundUp(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Workspace {
  Workspace(const AttentionSpec& spec, std::byte* base) : Workspace(spec, Arena(base)) {}
  Workspace(const AttentionSpec& spec, Arena arena) : rows(arena, kRows) {
    qk_dim = RoundUp(spec.head_dim, kLanes);
    v_dim = RoundUp(spec.v_head_dim, kLanes);
    qk_row = RowStride(qk_dim);
    v_row = RowStride(v_dim);
    k = arena.Take<float>(std::size_t{kKeys} * qk_row);
    v = arena.Take<float>(std::size_t{kKeys} * v_row);
    dk = arena.Take<float>(std::size_t{kKeys} * qk_row);
    dv = arena.Take<float>(std::size_t{kKeys} * v_row);
    q = arena.Take<float>(std::size_t{kRows} * qk_row);
    q_t = arena.Take<float>(std::size_t{kRows} * spec.head_dim);
    d_out = arena.Take<float>(std::size_t{kRows} * v_row);
    d_out_t = arena.Take<float>(std::size_t{kRows} * spec.v_head_dim);
    // The last register tile of dq may reach past the last row.
    dq = arena.Take<float>(std::size_t{kRows + kTileRows} * qk_row);
    p = arena.Take<float>(std::size_t{kKeys} * kRows);
    ds = arena.Take<float>(std::size_t{kKeys} * kRows + kTileRows);
    key_position = arena.Take<std::int64_t>(kKeys);
    bytes = arena.used();
  }

  BackwardRows rows;
  int qk_dim;  // padded to vectors
  int v_dim;
  int qk_row;  // from row to row
  int v_row;
  float* k;  // [key, qk_row]
  float* v;  // [key, v_row]
  float* dk;
  float* dv;
  float* q;                    // [row, qk_row]
  float* q_t;                  // [panel, head_dim, kPanel], scaled
  float* d_out;                // [row, v_row]
  float* d_out_t;              // [panel, v_head_dim, kPanel]
  float* dq;                   // [row, qk_row]
  float* p;                    // [key, kRows]: scores, then weights
  float* ds;                   // [key, kRows]: gradients of weights, then of scores
  std::int64_t* key_position;  // [key]
  std::size_t bytes;
};

// Calls fn.operator()<vectors, kAdd>() for vectors in [1, kMost].
template <int kMost, bool kAdd, class Fn>
HWY_INLINE void WithVectors(int vectors, const Fn& fn) {
  if (vectors == kMost) {
    fn.template operator()<kMost, kAdd>();
  } else if constexpr (kMost > 1) {
    WithVectors<kMost - 1, kAdd>(vectors, fn);
  }
}

// c[row, 0, width) (+)= sum over i of a(row, i) * b[i]; rows and width as they come, in register
// tiles. `width` is a multiple of kLanes.
template <bool kAccumulate>
void Product(const float* a, std::size_t a_row, std::size_t a_step, const float* b,
             std::size_t b_step, std::size_t n, float* c, std::size_t c_row, int rows, int width) {
  for (int column = 0; column < width;) {
    const int vectors = std::min((width - column) / kLanes, kTileVectors);
    for (std::size_t first = 0; first < n; first += kDepth) {
      const std::size_t depth = std::min(kDepth, n - first);
      const auto tiles = [&]<int kVectors, bool kAdd>() HWY_ATTR {
        for (int r = 0; r < rows; r += kTileRows) {
          Multiply<kTileRows, kVectors, kAdd>(a + r * a_row + first * a_step, a_row, a_step,
                                              b + first * b_step + column, b_step, depth,
                                              c + r * c_row + column, c_row);
        }
      };
      if (kAccumulate || first > 0) {
        WithVectors<kTileVectors, true>(vectors, tiles);
      } else {
        WithVectors<kTileVectors, false>(vectors, tiles);
      }
    }
    column += vectors * kLanes;
  }
}

class Block {
 public:
  explicit Block(const BackwardArgs& args)
      : args_(args),
        spec_(*args.spec),
        task_(*args.task),
        map_(spec_),
        w_(spec_, args.workspace),
        keys_(args.keys),
        padded_keys_(RoundUp(args.keys, kTileRows)) {}

  void Run() {
    args_.turns->Begin(args_.item);
    LoadKeys();
    const std::int64_t rows = task_.q.tokens * spec_.group();
    std::uint32_t step = 0;
    for (std::int64_t first = 0; first < rows; first += kRows, ++step) {
      const int count = static_cast<int>(std::min<std::int64_t>(kRows, rows - first));
      if (!FindVisible(first, count)) continue;
      LoadRows(first, count);
      ComputeScores();
      AccumulateKeyGradients();
      ComputeQueryGradient();
      if (args_.predecessor) args_.turns->AwaitPredecessor(*args_.predecessor, step);
      AddQueryGradient(first, count);
      args_.turns->Pass(args_.item, step);
    }
    AddKeyGradients();
    // Blocks that were skipped are passed too: the end of this one implies those before it.
    if (args_.predecessor) {
      args_.turns->AwaitPredecessor(*args_.predecessor, Turns::kEnded - 1);
    }
    args_.turns->End(args_.item);
  }

 private:
  void LoadKeys() {
    ClearPadding(w_.k, padded_keys_, w_.qk_row, spec_.head_dim);
    ClearPadding(w_.v, padded_keys_, w_.v_row, spec_.v_head_dim);
    for (int j = 0; j < keys_; ++j) {
      const std::int64_t slot = args_.key_begin + j;
      WidenRow(task_.kv.dtype, task_.kv.KeyRow(slot, args_.kv_head), spec_.head_dim,
               w_.k + j * w_.qk_row);
      WidenRow(task_.kv.dtype, task_.kv.ValueRow(slot, args_.kv_head), spec_.v_head_dim,
               w_.v + j * w_.v_row);
    }
    std::memset(w_.dk, 0, sizeof(float) * padded_keys_ * w_.qk_row);
    std::memset(w_.dv, 0, sizeof(float) * padded_keys_ * w_.v_row);
    keys_finite_ = AllFinite(w_.k, static_cast<std::size_t>(padded_keys_) * w_.qk_row) &&
                   AllFinite(w_.v, static_cast<std::size_t>(padded_keys_) * w_.v_row);
    task_.kv_positions.Fill(args_.key_begin, {w_.key_position, static_cast<std::size_t>(keys_)});
  }

  // Rows beyond `keys_`, and columns beyond the dim, must hold no garbage.
  void ClearPadding(float* tile, int rows, int padded, int dim) const {
    if (padded != dim) {
      std::memset(tile, 0, sizeof(float) * rows * padded);
    } else {
      std::memset(tile + keys_ * padded, 0, sizeof(float) * (rows - keys_) * padded);
    }
  }

  // Which of the rows' visible keys are in this block. False if none.
  bool FindVisible(std::int64_t first, int count) {
    if (!w_.rows.Find(spec_, task_, first, count, args_.key_begin, keys_, w_.key_position[0])) {
      return false;
    }
    first_panel_ = w_.rows.first_row / kPanel;
    last_panel_ = (w_.rows.last_row + kPanel - 1) / kPanel;
    full_ = w_.rows.AllSee(0, keys_);
    return true;
  }

  void LoadRows(std::int64_t first, int count) {
    const int group = spec_.group();
    row_begin_ = first_panel_ * kPanel;
    row_end_ = last_panel_ * kPanel;
    float finite = 0.0f;  // NaN if any input is not finite
    for (int i = row_begin_; i < row_end_; ++i) {
      float* q = w_.q + i * w_.qk_row;
      float* d_out = w_.d_out + i * w_.v_row;
      std::memset(q, 0, sizeof(float) * w_.qk_row);
      std::memset(d_out, 0, sizeof(float) * w_.v_row);
      w_.rows.Clear(i);
      if (i < count) {
        FetchRow(first + std::min(i + kAhead, count - 1));
        const std::int64_t token = (first + i) / group;
        const int head = args_.kv_head * group + static_cast<int>((first + i) % group);
        WidenRow(task_.q.dtype, task_.q.Row(token, head), spec_.head_dim, q);
        WidenRow(DType::kF32, task_.d_out.Row(token, head), spec_.v_head_dim, d_out);
        const auto* out = reinterpret_cast<const float*>(task_.out.Row(token, head));
        finite += w_.rows.Set(spec_, task_, args_.kv_head, first + i, i,
                              Dot(d_out, out, spec_.v_head_dim));
      }
    }
    for (int i = row_begin_; i < row_end_; i += 4) {
      TransposeFourRows(w_.q + i * w_.qk_row, w_.qk_row, spec_.head_dim, map_.query_scale,
                        QueryPanel(i / kPanel) + i % kPanel, kPanel);
      TransposeFourRows(w_.d_out + i * w_.v_row, w_.v_row, spec_.v_head_dim, 1.0f,
                        DOutPanel(i / kPanel) + i % kPanel, kPanel);
    }
    const auto loaded = static_cast<std::size_t>(row_end_ - row_begin_);
    rows_finite_ = finite == 0.0f && AllFinite(w_.q + row_begin_ * w_.qk_row, loaded * w_.qk_row) &&
                   AllFinite(w_.d_out + row_begin_ * w_.v_row, loaded * w_.v_row);
  }

  // Rows of one head lie far apart: no hardware fetches them ahead.
  void FetchRow(std::int64_t row) const {
    const std::int64_t token = row / spec_.group();
    const int head = args_.kv_head * spec_.group() + static_cast<int>(row % spec_.group());
    PrefetchRow(task_.q.Row(token, head),
                static_cast<int>(RowBytes(task_.q.dtype, spec_.head_dim)));
    PrefetchRow(task_.d_out.Row(token, head), static_cast<int>(sizeof(float)) * spec_.v_head_dim);
    PrefetchRow(task_.out.Row(token, head), static_cast<int>(sizeof(float)) * spec_.v_head_dim);
  }

  // p and ds of the visible panels.
  void ComputeScores() {
    for (int panel = first_panel_; panel < last_panel_; ++panel) {
      Product<false>(w_.k, w_.qk_row, 1, QueryPanel(panel), kPanel, spec_.head_dim,
                     w_.p + panel * kPanel, kRows, padded_keys_, kPanel);
      Product<false>(w_.v, w_.v_row, 1, DOutPanel(panel), kPanel, spec_.v_head_dim,
                     w_.ds + panel * kPanel, kRows, padded_keys_, kPanel);
    }
    if (full_ && map_.plain()) {
      for (int j = 0; j < keys_; ++j) Differentiate<true>(j);
    } else {
      for (int j = 0; j < keys_; ++j) Differentiate<false>(j);
    }
  }

  template <bool kPlain>
  HWY_INLINE void Differentiate(int key) {
    const DF d;
    const hn::RebindToSigned<DF> di;
    const auto j = hn::Set(di, key);
    const VF key_offset = hn::Set(d, static_cast<float>(w_.key_position[key] - w_.key_position[0]));
    for (int i = row_begin_; i < row_end_; i += kLanes) {
      float* p_at = w_.p + key * kRows + i;
      float* ds_at = w_.ds + key * kRows + i;
      VF score = hn::Load(d, p_at);
      VF cap_slope = hn::Set(d, 1.0f);
      if constexpr (!kPlain) {
        if (map_.has_cap) {
          const VF t = hn::Tanh(d, score);
          cap_slope = hn::NegMulAdd(t, t, cap_slope);
          score = hn::Mul(hn::Set(d, map_.cap), t);
        }
        if (map_.has_alibi) {
          const VF distance = hn::Abs(hn::Sub(hn::Load(d, w_.rows.offset + i), key_offset));
          score = hn::NegMulAdd(hn::Load(d, w_.rows.slope + i), distance, score);
        }
      }
      VF p = Exp2(hn::Sub(score, hn::Load(d, w_.rows.lse + i)));
      VF ds = hn::Mul(p, hn::Sub(hn::Load(d, ds_at), hn::Load(d, w_.rows.delta + i)));
      if constexpr (!kPlain) {
        ds = hn::Mul(ds, cap_slope);
        const auto visible =
            hn::RebindMask(d, hn::AndNot(hn::Lt(j, hn::Load(di, w_.rows.begin + i)),
                                         hn::Lt(j, hn::Load(di, w_.rows.end + i))));
        p = hn::IfThenElseZero(visible, p);
        ds = hn::IfThenElseZero(visible, ds);
      }
      hn::Store(p, d, p_at);
      hn::Store(ds, d, ds_at);
    }
  }

  // Zeros of p and ds may be multiplied with everything only if everything is finite.
  bool Masking() const { return !full_ && !(keys_finite_ && rows_finite_); }

  void AccumulateKeyGradients() {
    const auto rows = static_cast<std::size_t>(row_end_ - row_begin_);
    const float* q = w_.q + row_begin_ * w_.qk_row;
    const float* d_out = w_.d_out + row_begin_ * w_.v_row;
    if (!Masking()) {
      Product<true>(w_.p + row_begin_, kRows, 1, d_out, w_.v_row, rows, w_.dv, w_.v_row,
                    padded_keys_, w_.v_dim);
      Product<true>(w_.ds + row_begin_, kRows, 1, q, w_.qk_row, rows, w_.dk, w_.qk_row,
                    padded_keys_, w_.qk_dim);
      return;
    }
    ForVisible([&](int i, int j) {
      AddScaled(w_.p[j * kRows + i], w_.d_out + i * w_.v_row, w_.v_row, w_.dv + j * w_.v_row);
      AddScaled(w_.ds[j * kRows + i], w_.q + i * w_.qk_row, w_.qk_row, w_.dk + j * w_.qk_row);
    });
  }

  void ComputeQueryGradient() {
    if (!Masking()) {
      Product<false>(w_.ds + row_begin_, 1, kRows, w_.k, w_.qk_row, static_cast<std::size_t>(keys_),
                     w_.dq + row_begin_ * w_.qk_row, w_.qk_row,
                     RoundUp(row_end_ - row_begin_, kTileRows), w_.qk_dim);
      return;
    }
    std::memset(w_.dq, 0, sizeof(float) * kRows * w_.qk_row);
    ForVisible([&](int i, int j) {
      AddScaled(w_.ds[j * kRows + i], w_.k + j * w_.qk_row, w_.qk_row, w_.dq + i * w_.qk_row);
    });
  }

  template <class Fn>
  void ForVisible(const Fn& fn) const {
    for (int i = row_begin_; i < row_end_; ++i) {
      for (int j = w_.rows.begin[i]; j < w_.rows.end[i]; ++j) fn(i, j);
    }
  }

  static void AddScaled(float factor, const float* source, int n, float* target) {
    for (int d = 0; d < n; ++d) target[d] += factor * source[d];
  }

  void AddQueryGradient(std::int64_t first, int count) {
    const int group = spec_.group();
    for (int i = row_begin_; i < std::min(row_end_, count); ++i) {
      if (w_.rows.begin[i] >= w_.rows.end[i]) continue;
      FetchGradient(first + std::min(i + kAhead, count - 1));
      const std::int64_t token = (first + i) / group;
      const int head = args_.kv_head * group + static_cast<int>((first + i) % group);
      AddScaled(spec_.scale, w_.dq + i * w_.qk_row, spec_.head_dim, task_.dq.Row(token, head));
    }
  }

  void FetchGradient(std::int64_t row) const {
    const std::int64_t token = row / spec_.group();
    const int head = args_.kv_head * spec_.group() + static_cast<int>(row % spec_.group());
    PrefetchRow(reinterpret_cast<const std::byte*>(task_.dq.Row(token, head)),
                static_cast<int>(sizeof(float)) * spec_.head_dim);
  }

  void AddKeyGradients() {
    for (int j = 0; j < keys_; ++j) {
      const std::int64_t slot = args_.key_begin + j;
      AddScaled(spec_.scale, w_.dk + j * w_.qk_row, spec_.head_dim,
                task_.dk.Row(slot, args_.kv_head));
      AddScaled(1.0f, w_.dv + j * w_.v_row, spec_.v_head_dim, task_.dv.Row(slot, args_.kv_head));
    }
  }

  float* QueryPanel(int panel) const { return w_.q_t + panel * kPanel * spec_.head_dim; }
  float* DOutPanel(int panel) const { return w_.d_out_t + panel * kPanel * spec_.v_head_dim; }

  const BackwardArgs& args_;
  const AttentionSpec& spec_;
  const BackwardTask& task_;
  const ScoreMap map_;
  Workspace w_;
  const int keys_;
  const int padded_keys_;
  bool keys_finite_ = true;
  bool rows_finite_ = true;
  bool full_ = true;     // every row sees every key of the block
  int first_panel_ = 0;  // panels with a visible key: [first_panel_, last_panel_)
  int last_panel_ = 0;
  int row_begin_ = 0;  // the same, in rows
  int row_end_ = 0;
};

}  // namespace

BackwardBlock BlockOfBackward(const AttentionSpec& spec, const BackwardTask& /*task*/) noexcept {
  return {kKeys, Workspace(spec, nullptr).bytes};
}

void Backward(const BackwardArgs& args) noexcept { Block(args).Run(); }

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
