// AMX: eight tiles of 1 KB, and an instruction that multiplies two of them.

#include "kernels/cpu/bf16/product.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>

#include "kernels/cpu/amx_tiles.h"

namespace treeline::cpu::bf16 {
namespace {

#define TREELINE_AMX __attribute__((target("amx-tile,amx-bf16")))

TREELINE_AMX void Begin() noexcept {
  constexpr int kTiles = 8;
  TileConfig config;
  for (int t = 0; t < kTiles; ++t) config.Set(t, kTileRows, 2 * 2 * kTileRows);
  Load(config);
}

TREELINE_AMX void End() noexcept { _tile_release(); }

// Tiles 0 to 3 are c, 4 and 5 its left sides, 6 and 7 its right ones.
TREELINE_AMX void Multiply(const Product& p) noexcept {
  constexpr std::int64_t kElement = sizeof(std::uint16_t);
  constexpr std::int64_t kTileStride = 2 * kTileRows * kElement;
  const std::int64_t c_bytes = p.c_row * std::int64_t{sizeof(float)};
  const std::int64_t a_bytes = p.a_row * kElement;
  float* lower = p.c + kTileRows * p.c_row;
  asm volatile("" ::: "memory");  // gcc 12 does not know that tile loads read memory
  if (p.add) {
    _tile_loadd(0, p.c, c_bytes);
    _tile_loadd(1, p.c + kTileRows, c_bytes);
    _tile_loadd(2, lower, c_bytes);
    _tile_loadd(3, lower + kTileRows, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int s = 0; s < p.steps; ++s) {
    const std::uint16_t* a = p.a + s * p.a_step;
    const std::uint16_t* b = p.b + s * p.b_step;
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, kTileStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + p.b_column, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTileRows * p.a_row, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, p.c, c_bytes);
  _tile_stored(1, p.c + kTileRows, c_bytes);
  _tile_stored(2, lower, c_bytes);
  _tile_stored(3, lower + kTileRows, c_bytes);
}

constexpr Multiplier kAmx{.begin = Begin, .multiply = Multiply, .end = End};

bool CpuHasAmx() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0 && (d & kAmxTile) != 0;
}

// Whether the system saves tiles when it switches threads.
__attribute__((target("xsave"))) bool SystemKeepsTiles() {
  constexpr std::uint64_t kTileState = 0x60000;
  return (static_cast<std::uint64_t>(_xgetbv(0)) & kTileState) == kTileState;
}

// For all threads of the process, for good. Without it the first tile is a SIGILL.
bool MayUseTiles() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

sigjmp_buf refused;
pthread_t asking;

// On the thread that asks, a signal is the answer. Others' are none of ours.
void Refuse(int /*signal*/) {
  if (pthread_equal(pthread_self(), asking) != 0) siglongjmp(refused, 1);
  signal(SIGILL, SIG_DFL);
}

// One product of which every element is known. Some systems say that they have tiles and kill who
// uses them: a signal counts as a wrong result.
bool ProductIsRight() {
  constexpr std::uint16_t kOne = 0x3F80;
  constexpr std::uint16_t kTwo = 0x4000;
  alignas(64) static std::uint16_t a[kSide * kDepth];
  alignas(64) static std::uint16_t b[2 * kTileSize];
  alignas(64) static float c[kSide * kSide];
  for (int i = 0; i < kSide * kDepth; ++i) a[i] = i % kDepth == i / kDepth ? kTwo : kOne;
  for (int i = 0; i < 2 * kTileSize; ++i) b[i] = i % 4 < 2 ? kOne : kTwo;
  struct sigaction handler = {};
  struct sigaction before = {};
  asking = pthread_self();
  handler.sa_handler = Refuse;
  sigemptyset(&handler.sa_mask);
  if (sigaction(SIGILL, &handler, &before) != 0) return false;
  volatile bool right = true;
  if (sigsetjmp(refused, 1) == 0) {
    Begin();
    Multiply({.a = a,
              .a_row = kDepth,
              .a_step = 0,
              .b = b,
              .b_column = kTileSize,
              .b_step = 0,
              .steps = 1,
              .c = c,
              .c_row = kSide,
              .add = false});
    End();
    // Columns take turns in being all ones and all twos; every row has one two.
    for (int i = 0; i < kSide * kSide; ++i) {
      right = right && c[i] == static_cast<float>((kDepth + 1) * (i % 2 + 1));
    }
  } else {
    right = false;
  }
  sigaction(SIGILL, &before, nullptr);
  return right;
}

}  // namespace

const char* WhyNoAmx() {
  static const char* const why = [] {
    if (!CpuHasAmx()) return "the CPU has no AMX";
    if (!SystemKeepsTiles()) return "the system does not keep tiles of AMX";
    if (!MayUseTiles()) return "the system denies this process the tiles of AMX";
    if (!ProductIsRight()) return "a product with tiles of AMX failed";
    return static_cast<const char*>(nullptr);
  }();
  return why;
}

const Multiplier* AmxMultiplier() { return WhyNoAmx() == nullptr ? &kAmx : nullptr; }

}  // namespace treeline::cpu::bf16

#else

namespace treeline::cpu::bf16 {

const char* WhyNoAmx() { return "this build has no AMX"; }
const Multiplier* AmxMultiplier() { return nullptr; }

}  // namespace treeline::cpu::bf16

#endif
