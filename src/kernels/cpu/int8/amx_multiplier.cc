// AMX with 8-bit integers: a unit of 16 keys is a tile as it lies, and so is what it is multiplied
// with. Values are weighed by VNNI, which every such machine has.

#include "kernels/cpu/int8/product.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/bf16/product.h"

namespace treeline::cpu::int8 {
namespace {

#define TREELINE_AMX __attribute__((target("amx-tile,amx-int8")))

// Units by turns take tiles t, 2 + t and 4 + t for sums, keys and queries.
TREELINE_AMX void Begin() noexcept {
  TileConfig config;
  for (int t = 0; t < 2; ++t) {
    config.Set(t, kKeys, kRows * int{sizeof(std::int32_t)});
    config.Set(2 + t, kKeys, kUnit);
    config.Set(4 + t, kUnit / kTogether, kRows * kTogether);
  }
  Load(config);
}

TREELINE_AMX void End() noexcept { _tile_release(); }

TREELINE_AMX void Multiply(const Product& p) noexcept {
  constexpr std::int64_t kSumsStride = kRows * sizeof(std::int32_t);
  constexpr std::int64_t kQueryStride = kRows * kTogether;
  asm volatile("" ::: "memory");  // gcc 12 does not know that tile loads read memory
  int u = 0;
  for (; u + 2 <= p.units; u += 2) {
    const std::byte* keys = p.keys + u * p.unit_stride;
    const QueryUnit* query = p.query + u;
    _tile_zero(0);
    _tile_loadd(2, keys, p.key_stride);
    _tile_loadd(4, query->values, kQueryStride);
    _tile_dpbssd(0, 2, 4);
    _tile_zero(1);
    _tile_loadd(3, keys + p.unit_stride, p.key_stride);
    _tile_loadd(5, query[1].values, kQueryStride);
    _tile_dpbssd(1, 3, 5);
    _tile_stored(0, p.sums + u * kUnitSums, kSumsStride);
    _tile_stored(1, p.sums + (u + 1) * kUnitSums, kSumsStride);
  }
  if (u < p.units) {
    _tile_zero(0);
    _tile_loadd(2, p.keys + u * p.unit_stride, p.key_stride);
    _tile_loadd(4, p.query[u].values, kQueryStride);
    _tile_dpbssd(0, 2, 4);
    _tile_stored(0, p.sums + u * kUnitSums, kSumsStride);
  }
}

bool CpuMultipliesBytes() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned kAmxInt8 = 1U << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxInt8) != 0;
}

}  // namespace

const Multiplier* AmxMultiplier() {
  static const bool there =
      VnniMultiplier() != nullptr && bf16::WhyNoAmx() == nullptr && CpuMultipliesBytes();
  if (!there) return nullptr;
  static const Multiplier amx{
      .begin = Begin, .multiply = Multiply, .weigh = VnniMultiplier()->weigh, .end = End};
  return &amx;
}

}  // namespace treeline::cpu::int8

#else

namespace treeline::cpu::int8 {

const Multiplier* AmxMultiplier() { return nullptr; }

}  // namespace treeline::cpu::int8

#endif
