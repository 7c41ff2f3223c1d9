// Gradients in bf16 of a block of keys, over all query rows that see it: five products by a
// machine's matrix instructions, sums in f32, weights and their gradients rounded to bf16.
//
// Everything is computed transposed, so that no operand has to be turned round but the keys, once:
//   S^T = K Q^T      dP^T = V dO^T      P = exp(S - lse)      dS = P (dP - dO.O)
//   dV += P^T dO     dK += dS^T Q       dQ^T = K^T dS^T

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/bf16/backward.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "kernels/cpu/backward_rows.h"
#include "kernels/cpu/bf16/kernels-inl.h"
#include "kernels/cpu/bf16/pack-inl.h"
#include "kernels/cpu/turns.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

constexpr int kRows = 128;
constexpr int kRowGroups = kRows / kSide;
static_assert(kSide == kDepth);  // dims are padded to both

// Of a block: as many as the second-level cache has room for, unless there would be few blocks.
int BlockKeys(const AttentionSpec& spec, const BackwardTask& task) {
  constexpr int kLeast = 192;
  constexpr int kMost = 2 * kLeast;
  constexpr std::int64_t kManyBlocks = 64;
  const bool small_rows = spec.head_dim <= 128 && spec.v_head_dim <= 128;
  return small_rows && task.kv.slots * spec.kv_heads >= kMost * kManyBlocks ? kMost : kLeast;
}

struct Workspace {
  Workspace(const AttentionSpec& spec, int keys, std::byte* base)
      : Workspace(spec, static_cast<std::size_t>(RoundUp(keys, kSide)), Arena(base)) {}
  Workspace(const AttentionSpec& spec, std::size_t keys, Arena arena) : rows(arena, kRows) {
    qk_dim = RoundUp(spec.head_dim, kDepth);
    v_dim = RoundUp(spec.v_head_dim, kDepth);
    k = arena.Take<Bits>(keys * qk_dim);
    v = arena.Take<Bits>(keys * v_dim);
    k_t = arena.Take<Bits>(keys * qk_dim);
    dk = arena.Take<float>(keys * qk_dim);
    dv = arena.Take<float>(keys * v_dim);
    q_columns = arena.Take<Bits>(std::size_t{kRows} * qk_dim);
    q_rows = arena.Take<Bits>(std::size_t{kRows} * qk_dim);
    d_out = arena.Take<Bits>(std::size_t{kRows} * v_dim);
    d_out_columns = arena.Take<Bits>(std::size_t{kRows} * v_dim);
    d_out_rows = arena.Take<Bits>(std::size_t{kRows} * v_dim);
    dq_t = arena.Take<float>(std::size_t{kRows} * qk_dim);
    scores = arena.Take<float>(std::size_t{kSide} * kRows);
    d_weights = arena.Take<float>(std::size_t{kSide} * kRows);
    p = arena.Take<Bits>(keys * kRows);
    ds = arena.Take<Bits>(keys * kRows);
    ds_pairs = arena.Take<Bits>(keys * kRows);
    zeros = arena.Take<Bits>(AttentionSpec::kMaxHeadDim);
    wide = arena.Take<float>(std::size_t{2} * AttentionSpec::kMaxHeadDim);
    key_position = arena.Take<std::int64_t>(keys);
    bytes = arena.used();
  }

  BackwardRows rows;
  int qk_dim;  // padded to the depth of a step
  int v_dim;
  Bits* k;              // [key, qk_dim]
  Bits* v;              // [key, v_dim]
  Bits* k_t;            // [key / 32, qk_dim, 32 keys]
  float* dk;            // [key, qk_dim]
  float* dv;            // [key, v_dim]
  Bits* q_columns;      // tiles [row / 16, qk_dim / 32]
  Bits* q_rows;         // tiles [row / 32, qk_dim / 16]
  Bits* d_out;          // [row, v_dim]
  Bits* d_out_columns;  // tiles, as those of q
  Bits* d_out_rows;
  float* dq_t;       // [qk_dim, kRows]
  float* scores;     // [kSide keys, kRows]
  float* d_weights;  // [kSide keys, kRows]
  Bits* p;           // [key, kRows], in the order of PairedRow
  Bits* ds;          // [key, kRows], likewise
  Bits* ds_pairs;    // tiles [key / 32, kRows / 16] of the same
  Bits* zeros;       // a row beyond the last
  float* wide;       // two rows, widened
  std::int64_t* key_position;
  std::size_t bytes;
};

class Block {
 public:
  Block(const BackwardArgs& args, const bf16::Multiplier& multiplier)
      : args_(args),
        multiplier_(multiplier),
        spec_(*args.spec),
        task_(*args.task),
        map_(spec_),
        w_(spec_, args.keys, args.workspace),
        padded_keys_(RoundUp(args.keys, kSide)) {}

  void Run() {
    args_.turns->Begin(args_.item);
    multiplier_.begin();
    LoadKeys();
    const std::int64_t rows = task_.q.tokens * spec_.group();
    std::uint32_t step = 0;
    for (std::int64_t first = 0; first < rows; first += kRows, ++step) {
      const int count = static_cast<int>(std::min<std::int64_t>(kRows, rows - first));
      if (!w_.rows.Find(spec_, task_, first, count, args_.key_begin, args_.keys,
                        w_.key_position[0])) {
        continue;
      }
      first_group_ = w_.rows.first_key / kSide;
      last_group_ = (w_.rows.last_key + kSide - 1) / kSide;
      LoadRows(first, count);
      for (int g = first_group_; g < last_group_; ++g) ComputeScores(g);
      // Zeros may be multiplied with everything only if everything is finite.
      const bool all_see = w_.rows.AllSee(first_group_ * kSide, last_group_ * kSide);
      if (all_see || (keys_finite_ && rows_finite_)) {
        AccumulateKeyGradients();
        ComputeQueryGradient();
      } else {
        AccumulateVisible(first, count);
      }
      if (args_.predecessor) args_.turns->AwaitPredecessor(*args_.predecessor, step);
      AddQueryGradient(first, count);
      args_.turns->Pass(args_.item, step);
    }
    AddKeyGradients();
    multiplier_.end();
    // Blocks that were skipped are passed too: the end of this one implies those before it.
    if (args_.predecessor) {
      args_.turns->AwaitPredecessor(*args_.predecessor, Turns::kEnded - 1);
    }
    args_.turns->End(args_.item);
  }

 private:
  struct QueryRow {
    std::int64_t token;
    int head;
  };
  QueryRow RowAt(std::int64_t row) const {
    return {row / spec_.group(),
            args_.kv_head * spec_.group() + static_cast<int>(row % spec_.group())};
  }

  void LoadKeys() {
    std::memset(w_.zeros, 0, sizeof(Bits) * AttentionSpec::kMaxHeadDim);
    std::memset(w_.k, 0, sizeof(Bits) * padded_keys_ * w_.qk_dim);
    std::memset(w_.v, 0, sizeof(Bits) * padded_keys_ * w_.v_dim);
    for (int j = 0; j < args_.keys; ++j) {
      const std::int64_t slot = args_.key_begin + j;
      std::memcpy(w_.k + j * w_.qk_dim, task_.kv.KeyRow(slot, args_.kv_head),
                  sizeof(Bits) * spec_.head_dim);
      std::memcpy(w_.v + j * w_.v_dim, task_.kv.ValueRow(slot, args_.kv_head),
                  sizeof(Bits) * spec_.v_head_dim);
    }
    for (int j = 0; j < padded_keys_; ++j) {
      Bits* column = w_.k_t + j / kSide * kSide * w_.qk_dim + j % kSide;
      for (int d = 0; d < w_.qk_dim; ++d) column[d * kSide] = w_.k[j * w_.qk_dim + d];
    }
    std::memset(w_.dk, 0, sizeof(float) * padded_keys_ * w_.qk_dim);
    std::memset(w_.dv, 0, sizeof(float) * padded_keys_ * w_.v_dim);
    keys_finite_ = AllFiniteBits(w_.k, padded_keys_ * w_.qk_dim) &&
                   AllFiniteBits(w_.v, padded_keys_ * w_.v_dim);
    task_.kv_positions.Fill(args_.key_begin,
                            {w_.key_position, static_cast<std::size_t>(args_.keys)});
  }

  void LoadRows(std::int64_t first, int count) {
    const Bits* q[kRows];
    const Bits* d_out[kRows];
    float finite = 0.0f;  // NaN if an input is not finite
    rows_finite_ = true;
    for (int i = 0; i < kRows; ++i) {
      q[i] = d_out[i] = w_.zeros;
      w_.rows.Clear(i);
      if (i >= count) continue;
      const auto [token, head] = RowAt(first + i);
      q[i] = reinterpret_cast<const Bits*>(task_.q.Row(token, head));
      d_out[i] = w_.d_out + i * w_.v_dim;
      // dP is computed with the rounded row; its product with out must be, too, or the two would
      // not cancel where a row has one key.
      const float d_out_out =
          RoundRowAndMultiply(reinterpret_cast<const float*>(task_.d_out.Row(token, head)),
                              reinterpret_cast<const float*>(task_.out.Row(token, head)),
                              spec_.v_head_dim, w_.d_out + i * w_.v_dim);
      finite += w_.rows.Set(spec_, task_, args_.kv_head, first + i, i, d_out_out);
      rows_finite_ = rows_finite_ && AllFiniteBits(q[i], spec_.head_dim) &&
                     AllFiniteBits(d_out[i], spec_.v_head_dim);
    }
    rows_finite_ = rows_finite_ && finite == 0.0f;
    Pack(q, spec_.head_dim, w_.qk_dim, w_.q_columns, w_.q_rows);
    Pack(d_out, spec_.v_head_dim, w_.v_dim, w_.d_out_columns, w_.d_out_rows);
  }

  static void Pack(const Bits* const (&rows)[kRows], int dim, int padded, Bits* columns,
                   Bits* in_rows) {
    for (int i = 0; i < kRows; i += kTileRows) PackColumns(rows + i, dim, columns + i * padded);
    for (int i = 0; i < kRows; i += kSide) PackRows(rows + i, dim, in_rows + i * padded);
  }

  // p and ds of a group of 32 keys.
  void ComputeScores(int group) {
    MultiplyKeys(w_.k + group * kSide * w_.qk_dim, w_.q_columns, w_.qk_dim, w_.scores);
    MultiplyKeys(w_.v + group * kSide * w_.v_dim, w_.d_out_columns, w_.v_dim, w_.d_weights);
    const int begin = group * kSide;
    const bool plain = map_.plain() && w_.rows.AllSee(begin, begin + kSide);
    for (int j = 0; j < kSide; j += 2) {
      if (plain) {
        DifferentiatePair<true>(begin, j);
      } else {
        DifferentiatePair<false>(begin, j);
      }
    }
  }

  // c [kSide keys, kRows] = keys * columns.
  void MultiplyKeys(const Bits* keys, const Bits* columns, int dim, float* c) {
    for (int r = 0; r < kRowGroups; ++r) {
      multiplier_.multiply({.a = keys,
                            .a_row = dim,
                            .a_step = kDepth,
                            .b = columns + r * kSide * dim,
                            .b_column = std::int64_t{kTileRows} * dim,
                            .b_step = kTileSize,
                            .steps = dim / kDepth,
                            .c = c + r * kSide,
                            .c_row = kRows,
                            .add = false});
    }
  }

  struct Gradient {
    VF p;
    VF ds;
  };

  // Keys begin + j and begin + j + 1.
  template <bool kPlain>
  HWY_INLINE void DifferentiatePair(int begin, int j) {
    const DU du;
    const int key = begin + j;
    auto* p = reinterpret_cast<std::uint32_t*>(w_.p + key * kRows);
    auto* ds = reinterpret_cast<std::uint32_t*>(w_.ds + key * kRows);
    Bits* pairs = w_.ds_pairs + begin * kRows + j / 2 * kSide;
    for (int i = 0; i < kRows; i += 2 * kLanes) {
      const Gradient first[2] = {Differentiate<kPlain>(key, j, i),
                                 Differentiate<kPlain>(key, j, i + kLanes)};
      const Gradient second[2] = {Differentiate<kPlain>(key + 1, j + 1, i),
                                  Differentiate<kPlain>(key + 1, j + 1, i + kLanes)};
      hn::Store(RoundPairs(first[0].p, first[1].p), du, p + i / 2);
      hn::Store(RoundPairs(second[0].p, second[1].p), du, p + (kRows + i) / 2);
      hn::Store(RoundPairs(first[0].ds, first[1].ds), du, ds + i / 2);
      hn::Store(RoundPairs(second[0].ds, second[1].ds), du, ds + (kRows + i) / 2);
      for (int h = 0; h < 2; ++h) {
        hn::Store(RoundPairs(first[h].ds, second[h].ds), du,
                  reinterpret_cast<std::uint32_t*>(pairs + (i / kTileRows + h) * kTileSize));
      }
    }
  }

  template <bool kPlain>
  HWY_INLINE Gradient Differentiate(int key, int j, int i) const {
    const DF d;
    const hn::RebindToSigned<DF> di;
    VF score = hn::Mul(hn::Load(d, w_.scores + j * kRows + i), hn::Set(d, map_.query_scale));
    VF cap_slope = hn::Set(d, 1.0f);
    if constexpr (!kPlain) {
      if (map_.has_cap) {
        const VF t = hn::Tanh(d, score);
        cap_slope = hn::NegMulAdd(t, t, cap_slope);
        score = hn::Mul(hn::Set(d, map_.cap), t);
      }
      if (map_.has_alibi) {
        const std::int64_t distance_of_key =
            key < args_.keys ? w_.key_position[key] - w_.key_position[0] : 0;
        const VF distance = hn::Abs(hn::Sub(hn::Load(d, w_.rows.offset + i),
                                            hn::Set(d, static_cast<float>(distance_of_key))));
        score = hn::NegMulAdd(hn::Load(d, w_.rows.slope + i), distance, score);
      }
    }
    VF p = Exp2ForBf16(hn::Sub(score, hn::Load(d, w_.rows.lse + i)));
    VF ds = hn::Mul(
        p, hn::Sub(hn::Load(d, w_.d_weights + j * kRows + i), hn::Load(d, w_.rows.delta + i)));
    if constexpr (!kPlain) {
      ds = hn::Mul(ds, cap_slope);
      const auto at = hn::Set(di, key);
      const auto seen = hn::RebindMask(d, hn::AndNot(hn::Lt(at, hn::Load(di, w_.rows.begin + i)),
                                                     hn::Lt(at, hn::Load(di, w_.rows.end + i))));
      p = hn::IfThenElseZero(seen, p);
      ds = hn::IfThenElseZero(seen, ds);
    }
    return {p, ds};
  }

  void AccumulateKeyGradients() {
    for (int g = first_group_; g < last_group_; ++g) {
      AccumulateGroup(w_.p + g * kSide * kRows, w_.d_out_rows, w_.v_dim,
                      w_.dv + g * kSide * w_.v_dim);
      AccumulateGroup(w_.ds + g * kSide * kRows, w_.q_rows, w_.qk_dim,
                      w_.dk + g * kSide * w_.qk_dim);
    }
  }

  // target [kSide keys, dim] += weights [kSide keys, kRows] * rows [kRows, dim].
  void AccumulateGroup(const Bits* weights, const Bits* rows, int dim, float* target) {
    for (int d = 0; d < dim; d += kSide) {
      multiplier_.multiply({.a = weights,
                            .a_row = kRows,
                            .a_step = kDepth,
                            .b = rows + d / kTileRows * kTileSize,
                            .b_column = kTileSize,
                            .b_step = std::int64_t{kSide} * dim,
                            .steps = kRowGroups,
                            .c = target + d,
                            .c_row = dim,
                            .add = true});
    }
  }

  void ComputeQueryGradient() {
    const std::int64_t group_keys = std::int64_t{kSide} * w_.qk_dim;
    for (int d = 0; d < w_.qk_dim; d += kSide) {
      for (int r = 0; r < kRowGroups; ++r) {
        multiplier_.multiply({.a = w_.k_t + first_group_ * group_keys + d * kSide,
                              .a_row = kSide,
                              .a_step = group_keys,
                              .b = w_.ds_pairs + first_group_ * kSide * kRows + r * 2 * kTileSize,
                              .b_column = kTileSize,
                              .b_step = std::int64_t{kSide} * kRows,
                              .steps = last_group_ - first_group_,
                              .c = w_.dq_t + d * kRows + r * kSide,
                              .c_row = kRows,
                              .add = false});
      }
    }
  }

  // The same sums over what is visible alone: 0 * inf must not reach them.
  void AccumulateVisible(std::int64_t first, int count) {
    std::memset(w_.dq_t, 0, sizeof(float) * kRows * w_.qk_dim);
    float* q = w_.wide;
    float* k = w_.wide + AttentionSpec::kMaxHeadDim;
    for (int i = 0; i < count; ++i) {
      const auto [token, head] = RowAt(first + i);
      WidenRow(DType::kBF16, task_.q.Row(token, head), spec_.head_dim, q);
      const auto* d_out = reinterpret_cast<const float*>(task_.d_out.Row(token, head));
      for (int j = w_.rows.begin[i]; j < w_.rows.end[i]; ++j) {
        WidenRow(DType::kBF16, task_.kv.KeyRow(args_.key_begin + j, args_.kv_head), spec_.head_dim,
                 k);
        const int place = j * kRows + i / kSide * kSide + PairedPlace(i % kSide);
        const float p = F32FromBF16(w_.p[place]);
        const float ds = F32FromBF16(w_.ds[place]);
        for (int d = 0; d < spec_.v_head_dim; ++d) w_.dv[j * w_.v_dim + d] += p * d_out[d];
        for (int d = 0; d < spec_.head_dim; ++d) {
          w_.dk[j * w_.qk_dim + d] += ds * q[d];
          w_.dq_t[d * kRows + i] += ds * k[d];
        }
      }
    }
  }

  // Turned round, 16 rows and 16 dims at a time.
  void AddQueryGradient(std::int64_t first, int count) {
    alignas(64) float turned[kTileRows * kLanes];
    for (int i = 0; i < count; i += kTileRows) {
      float* target[kTileRows] = {};  // of rows that see a key
      for (int r = 0; r < std::min(kTileRows, count - i); ++r) {
        if (w_.rows.begin[i + r] >= w_.rows.end[i + r]) continue;
        const auto [token, head] = RowAt(first + i + r);
        target[r] = task_.dq.Row(token, head);
      }
      for (int d = 0; d < spec_.head_dim; d += kLanes) {
        __m512i columns[kTileRows];
#pragma GCC unroll 16
        for (int c = 0; c < kTileRows; ++c) {
          columns[c] = _mm512_loadu_si512(w_.dq_t + (d + c) * kRows + i);
        }
        TransposePairs(columns, reinterpret_cast<std::uint32_t*>(turned));
        for (int r = 0; r < kTileRows; ++r) {
          if (target[r] == nullptr) continue;
          AddScaled(spec_.scale, turned + r * kLanes, std::min(kLanes, spec_.head_dim - d),
                    target[r] + d);
        }
      }
    }
  }

  void AddKeyGradients() {
    for (int j = 0; j < args_.keys; ++j) {
      const std::int64_t slot = args_.key_begin + j;
      AddScaled(spec_.scale, w_.dk + j * w_.qk_dim, spec_.head_dim,
                task_.dk.Row(slot, args_.kv_head));
      AddScaled(1.0f, w_.dv + j * w_.v_dim, spec_.v_head_dim, task_.dv.Row(slot, args_.kv_head));
    }
  }

  // `source` is aligned to a vector and has whole ones.
  static HWY_INLINE void AddScaled(float factor, const float* source, int n, float* target) {
    const DF d;
    for (int i = 0; i < n; i += kLanes) {
      const auto some = hn::FirstN(d, static_cast<std::size_t>(n - i));
      const VF sum = hn::MulAdd(hn::Set(d, factor), hn::Load(d, source + i),
                                hn::MaskedLoad(some, d, target + i));
      hn::BlendedStore(sum, some, d, target + i);
    }
  }

  const BackwardArgs& args_;
  const bf16::Multiplier& multiplier_;
  const AttentionSpec& spec_;
  const BackwardTask& task_;
  const ScoreMap map_;
  Workspace w_;
  const int padded_keys_;
  bool keys_finite_ = true;
  bool rows_finite_ = true;
  int first_group_ = 0;  // of 32 keys, that any row of the block sees
  int last_group_ = 0;
};

}  // namespace

BackwardBlock BlockOfBf16Backward(const AttentionSpec& spec, const BackwardTask& task) noexcept {
  const int keys = BlockKeys(spec, task);
  return {keys, Workspace(spec, keys, nullptr).bytes};
}

void Bf16Backward(const BackwardArgs& args, const bf16::Multiplier& multiplier) noexcept {
  Block(args, multiplier).Run();
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
