// AVX-512 BF16: a dot product of pairs in every lane of a register.

#include "kernels/cpu/bf16/product.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

namespace treeline::cpu::bf16 {
namespace {

#define TREELINE_DOT __attribute__((target("avx512f,avx512bf16")))

// kRows rows of c, in registers.
template <int kRows>
TREELINE_DOT inline void MultiplyRows(const Product& p, int first) noexcept {
  constexpr int kPairs = kDepth / 2;
  __m512 sum[kRows][2];
  float* c = p.c + first * p.c_row;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      sum[r][v] = p.add ? _mm512_loadu_ps(c + r * p.c_row + v * kTileRows) : _mm512_setzero_ps();
    }
  }
  for (int s = 0; s < p.steps; ++s) {
    const std::uint16_t* a = p.a + first * p.a_row + s * p.a_step;
    const std::uint16_t* b = p.b + s * p.b_step;
    for (int k = 0; k < kPairs; ++k) {
      const std::uint16_t* row = b + k * 2 * kTileRows;
      const auto left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(row));
      const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(row + p.b_column));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        std::int32_t bits;
        std::memcpy(&bits, a + r * p.a_row + 2 * k, sizeof(bits));
        const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], pair, left);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], pair, right);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(c + r * p.c_row + v * kTileRows, sum[r][v]);
  }
}

TREELINE_DOT void Multiply(const Product& p) noexcept {
  MultiplyRows<12>(p, 0);
  MultiplyRows<12>(p, 12);
  MultiplyRows<8>(p, 24);
}

constexpr Multiplier kDot{.begin = []() noexcept {}, .multiply = Multiply, .end = []() noexcept {}};

}  // namespace

const Multiplier* DotMultiplier() {
  return __builtin_cpu_supports("avx512bf16") != 0 ? &kDot : nullptr;
}

}  // namespace treeline::cpu::bf16

#else

const treeline::cpu::bf16::Multiplier* treeline::cpu::bf16::DotMultiplier() { return nullptr; }

#endif
