#include <bit>

#include "kernels/cpu/bf16/product.h"

namespace treeline::cpu::bf16 {
namespace {

float Widen(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

void Multiply(const Product& p) noexcept {
  for (int r = 0; r < kSide; ++r) {
    float* c = p.c + r * p.c_row;
    if (!p.add) {
      for (int i = 0; i < kSide; ++i) c[i] = 0.0f;
    }
    for (int s = 0; s < p.steps; ++s) {
      const std::uint16_t* a = p.a + r * p.a_row + s * p.a_step;
      const std::uint16_t* b = p.b + s * p.b_step;
      for (int k = 0; k < kDepth; ++k) {
        const float left = Widen(a[k]);
        const std::uint16_t* row = b + k / 2 * 2 * kTileRows + k % 2;
        for (int i = 0; i < kTileRows; ++i) {
          c[i] += left * Widen(row[2 * i]);
          c[kTileRows + i] += left * Widen(row[p.b_column + 2 * i]);
        }
      }
    }
  }
}

constexpr Multiplier kPlain{
    .begin = []() noexcept {}, .multiply = Multiply, .end = []() noexcept {}};

}  // namespace

const Multiplier& PlainMultiplier() { return kPlain; }

}  // namespace treeline::cpu::bf16
