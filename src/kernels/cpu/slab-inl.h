// One block of keys and a slab of query rows: scores, softmax, weighted sum of values. Lanes are
// dims. Included once per target.

#if defined(TREELINE_KERNELS_CPU_SLAB_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREELINE_KERNELS_CPU_SLAB_INL_H_
#undef TREELINE_KERNELS_CPU_SLAB_INL_H_
#else
#define TREELINE_KERNELS_CPU_SLAB_INL_H_
#endif

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/kv_group.h"
#include "kernels/cpu/kv_load-inl.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

inline constexpr int kSlabRows = 4;  // query rows that are computed together
inline constexpr int kTileKeys =
    kManyRegisters ? 4 : 2;  // register tile of scores: keys x kSlabRows
inline constexpr int kTileVectors = kManyRegisters ? 4 : 3;  // of the output: kSlabRows x vectors
static_assert(kBlock % kTileKeys == 0);

// What has been summed for the rows of a slab.
struct alignas(64) SlabState {
  static constexpr int kRepeated = kSlabRows > kLanes ? kSlabRows : kLanes;
  // Per row, repeated to fill a vector, log2 domain; may lag.
  float maximum[kRepeated];
  // Lane i sums weights of row i % kSlabRows.
  float sum[kRepeated];

  void Clear() {
    std::fill(std::begin(maximum), std::end(maximum), kNoScore);
    std::fill(std::begin(sum), std::end(sum), 0.0f);
  }
  // Of all weights of a row.
  float Total(int row) const {
    float total = 0.0f;
    for (int i = row; i < kRepeated; i += kSlabRows) total += sum[i];
    return total;
  }
};

// Rows of keys or values of a block, and which of a later block's to fetch meanwhile.
struct BlockRows {
  const std::byte* const* rows;  // [kBlock], of key head 0
  std::int64_t offset;           // of the key head
  const std::byte* const* fetch = nullptr;
  std::int64_t fetch_offset = 0;
  int fetch_bytes = 0;  // of a row
};

// Scales of a block's keys or values, of loaders that leave them to be multiplied with.
struct UnitScales {
  static constexpr int kUnits = (AttentionSpec::kMaxHeadDim + LoadQ8::kUnit - 1) / LoadQ8::kUnit;

  // Of the first `keys` keys; scales of the others are 0.
  void Load(const BlockRows& block, int keys, int dim) {
    const DF d;
    const int units = (dim + LoadQ8::kUnit - 1) / LoadQ8::kUnit;
    HWY_ALIGN std::uint16_t bits[kUnits * kBlock];
    if (keys < kBlock) std::memset(bits, 0, sizeof(bits));
    // Numbers of units that are usual are constants: otherwise counting takes longer than copying.
    switch (units) {
      case 2:
        Copy(
            block, keys, [] { return 2; }, bits);
        break;
      case 4:
        Copy(
            block, keys, [] { return 4; }, bits);
        break;
      default:
        Copy(
            block, keys, [units] { return units; }, bits);
    }
    for (int i = 0; i < units * kBlock; i += kLanes) {
      hn::Store(LoadHalves(d, bits + i), d, of + i);
    }
  }

  HWY_ALIGN float of[kUnits * kBlock];  // [unit, key]

 private:
  template <class Units>
  static HWY_INLINE void Copy(const BlockRows& block, int keys, const Units& units,
                              std::uint16_t* bits) {
    for (int key = 0; key < keys; ++key) {
      const std::byte* row = block.rows[key] + block.offset;
      for (int u = 0; u < units(); ++u) bits[u * kBlock + key] = LoadQ8::ScaleBits(row, u);
    }
  }
};

// Arithmetic on one block for one slab; `scores` is what passes from one step to the next.
template <class Loader>
class SlabKernel {
 public:
  // `qk_dim` and `v_dim` are the dims padded to chunks.
  SlabKernel(const AttentionSpec& spec, int qk_dim, int v_dim)
      : head_dim_(spec.head_dim), v_head_dim_(spec.v_head_dim), qk_dim_(qk_dim), v_dim_(v_dim) {}

  float* scores() { return scores_; }  // [kBlock, kSlabRows]
  const auto& k_scales() const { return k_scales_; }
  const auto& v_scales() const { return v_scales_; }

  // Comes before all else that is done with a block, which has so many keys.
  HWY_INLINE void Begin(const BlockRows& k, const BlockRows& v, int keys) {
    if constexpr (Loader::kScaled) {
      k_scales_.Load(k, keys, head_dim_);
      v_scales_.Load(v, keys, v_head_dim_);
    }
  }

  // scores[key, row] = query . key.
  HWY_INLINE void Scores(const float* query, const BlockRows& k) {
    constexpr int kKeys = kTileKeys;
    const DF d;
    const int whole = head_dim_ / kChunk * kChunk;
    for (int key = 0; key < kBlock; key += kKeys) {
      if (k.fetch != nullptr) {
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) {
          PrefetchRow(k.fetch[key + j] + k.fetch_offset, k.fetch_bytes);
        }
      }
      VF sum[kKeys][kSlabRows];
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
#pragma GCC unroll 4
        for (int r = 0; r < kSlabRows; ++r) sum[j][r] = hn::Zero(d);
      }
      const std::byte* row[kKeys];
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) row[j] = k.rows[key + j] + k.offset;
      for (int element = 0; element < whole; element += kChunk) {
        const std::ptrdiff_t at = Loader::Offset(element);
        const float* scales = ScalesOf(k_scales_, element) + key;
        AddProducts(query + element, sum, [&](int j, bool second) HWY_ATTR {
          return Scaled(scales[j], Loader::Half(row[j] + at, second));
        });
      }
      if (whole < head_dim_) {
        const std::ptrdiff_t at = Loader::Offset(whole);
        const float* scales = ScalesOf(k_scales_, whole) + key;
        AddProducts(query + whole, sum, [&](int j, bool second) HWY_ATTR {
          return Scaled(scales[j], Loader::HalfTail(row[j] + at, second, head_dim_ - whole));
        });
      }
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
        StoreSums(sum[j][0], sum[j][1], sum[j][2], sum[j][3], scores_ + (key + j) * kSlabRows);
      }
    }
  }

  // scores become weights relative to the running maximum; the running sums grow. `out` is what has
  // been summed so far.
  HWY_INLINE void Softmax(SlabState& state, float* out) {
    constexpr int kPeriod = kLanes < kSlabRows ? kSlabRows : kLanes;
    const DF d;
    bool rescale = false;
    for (int offset = 0; offset < kPeriod; offset += kLanes) {
      VF highest = hn::Load(d, scores_ + offset);
      for (int i = offset + kPeriod; i < kBlock * kSlabRows; i += kPeriod) {
        highest = hn::Max(highest, hn::Load(d, scores_ + i));
      }
      const VF limit = hn::Add(hn::Load(d, state.maximum + offset), hn::Set(d, kLag));
      rescale = rescale || !hn::AllFalse(d, hn::Gt(highest, limit));
    }
    if (HWY_UNLIKELY(rescale)) Rescale(state, out);
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

  // out[row] += sum over a whole block of weight * value.
  HWY_INLINE void Weigh(float* out, const BlockRows& v) {
    const std::byte* row[kBlock];
    for (int key = 0; key < kBlock; ++key) row[key] = v.rows[key] + v.offset;
    const int whole = v_head_dim_ / kChunk * kChunk;
    if constexpr (Loader::kScaled) ScaleWeights();
    int fetched = 0;
    // Fetches as large a part of the rows as the columns up to `end` are of all: a burst would fill
    // the buffers of outstanding misses and stop everything.
    const auto fetch_until = [&](int end) HWY_ATTR {
      if (v.fetch == nullptr) return;
      for (; fetched * v_head_dim_ < kBlock * end; ++fetched) {
        PrefetchRow(v.fetch[fetched] + v.fetch_offset, v.fetch_bytes);
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
    if (whole < v_head_dim_) {
      fetch_until(v_head_dim_);
      const int count = v_head_dim_ - whole;
      WeighVectors<2>(
          out + whole, [&](int) HWY_ATTR { return WeightsOf(whole); },
          [&](int key, int i) HWY_ATTR {
            return Loader::HalfTail(row[key] + Loader::Offset(whole), i == 1, count);
          });
    }
  }

  // The same for one row and the keys that it sees: 0 * inf must not reach it.
  void WeighRow(float* slab_out, int r, const BlockRows& v, SlotRange keys) {
    const DF d;
    float* out = slab_out + r * v_dim_;
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
      const VF weight = hn::Set(d, scores_[key * kSlabRows + r]);
      for (int element = 0; element < v_head_dim_; element += kChunk) {
        const int left = v_head_dim_ - element;
        const std::byte* chunk = v.rows[key] + v.offset + Loader::Offset(element);
        // As ScaleWeights() does it: bits do not depend on what other rows see.
        const VF scaled = Scaled(ScalesOf(v_scales_, element)[key], weight);
        for (int half = 0; half < 2; ++half) {
          const VF x = left >= kChunk ? Loader::Half(chunk, half == 1)
                                      : Loader::HalfTail(chunk, half == 1, left);
          float* p = out + element + half * kLanes;
          hn::Store(hn::MulAdd(scaled, x, hn::Load(d, p)), d, p);
        }
      }
    }
  }

 private:
  struct Nothing {};
  static constexpr int kWeights = kBlock * kSlabRows;

  // The scales that the chunk at `element` has in each row of a block.
  template <class Scales>
  HWY_INLINE const float* ScalesOf(const Scales& scales, [[maybe_unused]] int element) const {
    if constexpr (Loader::kScaled) return scales.of + element / Loader::kUnit * kBlock;
    return scores_;  // not read
  }

  // What a loader gave, as it is in a row; or a weight, for what it gave.
  static HWY_INLINE VF Scaled([[maybe_unused]] const float& scale, VF x) {
    if constexpr (Loader::kScaled) return hn::Mul(hn::Set(DF(), scale), x);
    return x;
  }

  // Weights of a block, for the chunk at `element`.
  HWY_INLINE const float* WeightsOf([[maybe_unused]] int element) const {
    if constexpr (Loader::kScaled) return scaled_weights_.of + element / Loader::kUnit * kWeights;
    return scores_;
  }

  // A value's scale is the same for all elements of a unit: it is cheaper to multiply the weights.
  HWY_INLINE void ScaleWeights() {
    const DF d;
    const hn::RebindToSigned<DF> di;
    const int units = (v_head_dim_ + Loader::kUnit - 1) / Loader::kUnit;
    // Of kLanes keys: vector s of their weights has keys (s * kLanes + lane) / kSlabRows.
#pragma GCC unroll 4
    for (int s = 0; s < kSlabRows; ++s) {
      const auto keys = hn::IndicesFromVec(
          d, hn::ShiftRight<2>(hn::Iota(di, static_cast<std::int32_t>(s * kLanes))));
      for (int u = 0; u < units; ++u) {
        for (int key = 0; key < kBlock; key += kLanes) {
          const VF scales = hn::Load(d, v_scales_.of + u * kBlock + key);
          const int at = key * kSlabRows + s * kLanes;
          hn::Store(hn::Mul(hn::Load(d, scores_ + at), hn::TableLookupLanes(scales, keys)), d,
                    scaled_weights_.of + u * kWeights + at);
        }
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
        VF q = hn::Load(d, query + r * qk_dim_ + half * kLanes);
        KeepInRegister(q);
#pragma GCC unroll 4
        for (int j = 0; j < kTileKeys; ++j) sum[j][r] = hn::MulAdd(q, x[half][j], sum[j][r]);
      }
    }
  }

  // Raises each row's maximum to that of scores_ and scales what was summed under the old one.
  HWY_NOINLINE void Rescale(SlabState& state, float* out) {
    const DF d;
    for (int r = 0; r < kSlabRows; ++r) {
      float highest = state.maximum[r];
      for (int i = r; i < kBlock * kSlabRows; i += kSlabRows) {
        if (scores_[i] > highest) highest = scores_[i];
      }
      if (highest == state.maximum[r]) continue;
      const float factor = std::exp2(state.maximum[r] - highest);
      for (int i = r; i < SlabState::kRepeated; i += kSlabRows) {
        state.maximum[i] = highest;
        state.sum[i] *= factor;
      }
      for (int i = 0; i < v_dim_; i += kLanes) {
        float* p = out + r * v_dim_ + i;
        hn::Store(hn::Mul(hn::Load(d, p), hn::Set(d, factor)), d, p);
      }
    }
  }

  // Columns of kVectors vectors from the v-th; kFirst says which half of its chunk that is.
  template <int kVectors, int kFirst>
  HWY_INLINE void WeighVectors(float* out, int v, const std::byte* const (&row)[kBlock]) {
    const int element = v / 2 * kChunk;
    constexpr int kChunks = (kFirst + kVectors + 1) / 2;
    std::ptrdiff_t at[kChunks];
    const float* weights[kChunks];
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      at[c] = Loader::Offset(element + c * kChunk);
      weights[c] = WeightsOf(element + c * kChunk);
    }
    WeighVectors<kVectors>(
        out + v * kLanes, [&](int i) HWY_ATTR { return weights[(kFirst + i) / 2]; },
        [&](int key, int i) HWY_ATTR {
          return Loader::Half(row[key] + at[(kFirst + i) / 2], (kFirst + i) % 2 == 1);
        });
  }

  // out[row, 0 … kVectors) += sum over keys of weights(vector)[key, row] * load(key, vector).
  template <int kVectors, class Weights, class Load>
  HWY_INLINE void WeighVectors(float* out, const Weights& weights, const Load& load) {
    const DF d;
    VF sum[kSlabRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kSlabRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sum[r][i] = hn::Load(d, out + r * v_dim_ + i * kLanes);
    }
    for (int key = 0; key < kBlock; ++key) {
      VF x[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) x[i] = load(key, i);
#pragma GCC unroll 4
      for (int r = 0; r < kSlabRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          const VF weight = hn::Set(d, weights(i)[key * kSlabRows + r]);
          sum[r][i] = hn::MulAdd(weight, x[i], sum[r][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kSlabRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) hn::Store(sum[r][i], d, out + r * v_dim_ + i * kLanes);
    }
  }

  const int head_dim_;
  const int v_head_dim_;
  const int qk_dim_;
  const int v_dim_;
  HWY_ALIGN float scores_[kWeights];
  struct ScaledWeights {
    HWY_ALIGN float of[UnitScales::kUnits * kWeights];  // [unit, key, row]
  };
  std::conditional_t<Loader::kScaled, UnitScales, Nothing> k_scales_;
  std::conditional_t<Loader::kScaled, UnitScales, Nothing> v_scales_;
  std::conditional_t<Loader::kScaled, ScaledWeights, Nothing> scaled_weights_;
};

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
