#include <cmath>

#include "kernels/cpu/int8/product.h"

namespace treeline::cpu::int8 {
namespace {

void Multiply(const Product& p) noexcept {
  for (int u = 0; u < p.units; ++u) {
    const std::int8_t* query = p.query[u].values;
    for (int j = 0; j < kKeys; ++j) {
      const std::byte* key = p.keys + j * p.key_stride + u * p.unit_stride;
      for (int r = 0; r < kRows; ++r) {
        std::int32_t sum = 0;
        for (int i = 0; i < kUnit; ++i) {
          sum += static_cast<std::int8_t>(key[i]) *
                 query[(i / kTogether * kRows + r) * kTogether + i % kTogether];
        }
        p.sums[(u * kKeys + j) * kRows + r] = sum;
      }
    }
  }
}

void Weigh(const WeightedSum& s) noexcept {
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kUnit; ++i) {
      std::int32_t sum = 0;
      for (int j = 0; j < kKeys; ++j) {
        const std::int16_t weight = s.weights[(j % kPairs * kRows + r) * 2 + j / kPairs];
        sum += weight * static_cast<std::int8_t>(s.values[j][s.offset + i]);
      }
      float& out = s.out[r * s.out_stride + i];
      out = std::fma(static_cast<float>(sum), s.scales[r], out);
    }
  }
}

constexpr Multiplier kPlain{
    .begin = []() noexcept {}, .multiply = Multiply, .weigh = Weigh, .end = []() noexcept {}};

}  // namespace

const Multiplier& PlainMultiplier() { return kPlain; }

}  // namespace treeline::cpu::int8
