// AVX-512 with VNNI: dot products of four bytes, or of two 16-bit numbers, in each of 16 lanes. So
// that lanes are keys, or elements of values, neighbours in memory are put into one lane first.

#include "kernels/cpu/int8/product.h"

#if defined(__x86_64__)

// gcc 12's own intrinsics begin with vectors that they do not set.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include <cstring>

namespace treeline::cpu::int8 {
namespace {

#define TREELINE_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

TREELINE_VNNI inline __m256i LoadUnit(const std::byte* unit) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit));
}

// What a machine reads as four bytes or two 16-bit numbers, in all lanes.
template <class T>
TREELINE_VNNI inline __m512i Broadcast(const T* numbers) {
  std::int32_t bits;
  static_assert(kTogether * sizeof(std::int8_t) == sizeof(bits) &&
                2 * sizeof(std::int16_t) == sizeof(bits));
  std::memcpy(&bits, numbers, sizeof(bits));
  return _mm512_set1_epi32(bits);
}

struct Four {
  __m512i of[4];
};

// In each of the four parts of a vector: lane c of vector d becomes lane d of vector c.
TREELINE_VNNI inline Four Transpose(const Four& x) {
  const __m512i low01 = _mm512_unpacklo_epi32(x.of[0], x.of[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(x.of[0], x.of[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(x.of[2], x.of[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(x.of[2], x.of[3]);
  return {{_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
           _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)}};
}

TREELINE_VNNI void Multiply(const Product& p) noexcept {
  // One side must be unsigned: keys get 128 added, which the query's offsets take off again.
  const __m512i signs = _mm512_set1_epi8(-128);
  for (int u = 0; u < p.units; ++u) {
    const std::byte* keys = p.keys + u * p.unit_stride;
    // Part i of a vector is 16 elements of a key: the first half of key 4 c + 2 s, the second, then
    // those of the next key.
    Four set[2];
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const std::byte* key = keys + (4 * c + 2 * s) * p.key_stride;
        set[s].of[c] = _mm512_inserti64x4(_mm512_castsi256_si512(LoadUnit(key)),
                                          LoadUnit(key + p.key_stride), 1);
      }
      set[s] = Transpose(set[s]);
    }
    const QueryUnit& query = p.query[u];
    Four sum;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum.of[r] = _mm512_set1_epi32(query.offsets[r]);
    const auto add = [&](int group, __m512i elements) TREELINE_VNNI {
      const __m512i keys_now = _mm512_xor_si512(elements, signs);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum.of[r] = _mm512_dpbusd_epi32(sum.of[r], keys_now,
                                        Broadcast(query.values + (group * kRows + r) * kTogether));
      }
    };
    // Lane c of part i is of key 4 c + i, so that the sums need no more than one transposition.
#pragma GCC unroll 4
    for (int d = 0; d < 4; ++d) {
      add(d, _mm512_shuffle_i32x4(set[0].of[d], set[1].of[d], _MM_SHUFFLE(2, 0, 2, 0)));
      add(4 + d, _mm512_shuffle_i32x4(set[0].of[d], set[1].of[d], _MM_SHUFFLE(3, 1, 3, 1)));
    }
    sum = Transpose(sum);
    std::int32_t* sums = p.sums + u * kUnitSums;
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) _mm512_storeu_si512(sums + c * 16, sum.of[c]);
  }
}

TREELINE_VNNI void Weigh(const WeightedSum& s) noexcept {
  // Sums of the elements that unpacking puts into the lower and into the upper vector.
  __m512i low[kRows];
  __m512i high[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm512_setzero_si512();
  const std::byte* const* values = s.values;
  const std::int16_t* pair_weights = s.weights;
  const std::ptrdiff_t offset = s.offset;
#pragma GCC unroll 8
  for (int j = 0; j < kPairs; ++j) {
    const __m512i first = _mm512_cvtepi8_epi16(LoadUnit(values[j] + offset));
    const __m512i second = _mm512_cvtepi8_epi16(LoadUnit(values[j + kPairs] + offset));
    const __m512i lower = _mm512_unpacklo_epi16(first, second);
    const __m512i upper = _mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512i weights = Broadcast(pair_weights + (j * kRows + r) * 2);
      low[r] = _mm512_dpwssd_epi32(low[r], lower, weights);
      high[r] = _mm512_dpwssd_epi32(high[r], upper, weights);
    }
  }
  const __m512i front = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
  float* out = s.out;
  const float* scales = s.scales;
  const std::int64_t out_stride = s.out_stride;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r, out += out_stride) {
    const __m512 scale = _mm512_set1_ps(scales[r]);
    const __m512 sums[] = {_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low[r], front, high[r])),
                           _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low[r], back, high[r]))};
    _mm512_storeu_ps(out, _mm512_fmadd_ps(sums[0], scale, _mm512_loadu_ps(out)));
    _mm512_storeu_ps(out + 16, _mm512_fmadd_ps(sums[1], scale, _mm512_loadu_ps(out + 16)));
  }
}

constexpr Multiplier kVnni{
    .begin = []() noexcept {}, .multiply = Multiply, .weigh = Weigh, .end = []() noexcept {}};

}  // namespace

const Multiplier* VnniMultiplier() {
  static const bool there =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
      __builtin_cpu_supports("avx512vnni") != 0;
  return there ? &kVnni : nullptr;
}

}  // namespace treeline::cpu::int8

#else

namespace treeline::cpu::int8 {

const Multiplier* VnniMultiplier() { return nullptr; }

}  // namespace treeline::cpu::int8

#endif
