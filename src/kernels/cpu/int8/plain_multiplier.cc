#include "kernels/cpu/int8/product.h"

namespace treeline::cpu::int8 {
namespace {

void Multiply(const Product& p) noexcept {
  for (int u = 0; u < p.units; ++u) {
    const std::int8_t* query = p.query + u * p.query_stride;
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

constexpr Multiplier kPlain{
    .begin = []() noexcept {}, .multiply = Multiply, .end = []() noexcept {}};

}  // namespace

const Multiplier& PlainMultiplier() { return kPlain; }

}  // namespace treeline::cpu::int8
