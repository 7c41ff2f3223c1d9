// DotRows for machines with VNNI: a block of 32 weights becomes one vector of 16-bit numbers, and
// one instruction multiplies it with 32 activations. AVX-512 only.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm/vnni_rows.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>

#include "kernels/cpu/gemm/row_formats.h"
#include "kernels/cpu/kernels-inl.h"
#include "kernels/cpu/simd-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {
namespace {

// Sums of pairs of products. gcc would want a target of its own for the intrinsic.
HWY_INLINE __m512i PairProducts(__m512i weights, const std::int16_t* x) {
  __m512i sum = _mm512_setzero_si512();
  asm("vpdpwssd %2, %1, %0"
      : "+v"(sum)
      : "v"(weights), "m"(*reinterpret_cast<const __m512i_u*>(x)));
  return sum;
}

// Chains of additions that are under way at once.
struct Sums {
  static constexpr int kChains = 4;
  __m512 of[kChains];

  HWY_INLINE void Clear() {
#pragma GCC unroll 4
    for (__m512& sum : of) sum = _mm512_setzero_ps();
  }
  // Products of a unit of weights, all of one scale; or of a scale for each lane. `chain` is a
  // constant, so that sums stay in registers.
  HWY_INLINE void Add(int chain, __m512i weights, const std::int16_t* x, __m512 scale) {
    const __m512 products = _mm512_cvtepi32_ps(PairProducts(weights, x));
    of[chain] = _mm512_fmadd_ps(products, scale, of[chain]);
  }
  HWY_INLINE __m512 Total(__m512 rest) const {
    const __m512 all = _mm512_add_ps(_mm512_add_ps(of[0], of[1]), _mm512_add_ps(of[2], of[3]));
    return _mm512_add_ps(all, rest);
  }
};

// Rows are one stream through memory, and hardware that fetches ahead stops at every page.
HWY_INLINE void FetchAhead(const void* weights, std::size_t bytes) {
  constexpr std::uintptr_t kDistance = 4096;
  // A number, since what it points to may be beyond the file.
  const auto ahead = reinterpret_cast<std::uintptr_t>(weights) + kDistance;
  PrefetchRow(reinterpret_cast<const std::byte*>(ahead), static_cast<int>(bytes));
}

HWY_INLINE __m512i WidenBytes(const std::uint8_t* bytes) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

// 4 bits of elements i and i + 16 share byte i.
HWY_INLINE __m512i WidenNibbles(const std::uint8_t* bytes) {
  const __m256i twice =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i shifted = _mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), shifts);
  return _mm512_and_si512(shifted, _mm512_set1_epi16(15));
}

// The lower halves of 16 lanes, which are 16-bit floats.
HWY_INLINE __m512 WidenHalves(__m512i lanes) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(lanes));
}

// Formats with a block for each unit of activations. `heads` are the first four bytes of 16 blocks.

struct Q40 {
  using Block = Q40Block;
  static HWY_INLINE __m512i Weights(const Block& block) { return WidenNibbles(block.q); }
  static HWY_INLINE __m512 AddConstants(__m512i /*heads*/, __m512 d, __m512 x_sums, __m512 sum) {
    return _mm512_fnmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(8.0f)), x_sums, sum);
  }
};

struct Q41 {
  using Block = Q41Block;
  static HWY_INLINE __m512i Weights(const Block& block) { return WidenNibbles(block.q); }
  static HWY_INLINE __m512 AddConstants(__m512i heads, __m512 /*d*/, __m512 x_sums, __m512 sum) {
    return _mm512_fmadd_ps(WidenHalves(_mm512_srli_epi32(heads, 16)), x_sums, sum);
  }
};

struct Q80 {
  using Block = Q80Block;
  static HWY_INLINE __m512i Weights(const Block& block) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.q)));
  }
  static HWY_INLINE __m512 AddConstants(__m512i /*heads*/, __m512 /*d*/, __m512 /*x_sums*/,
                                        __m512 sum) {
    return sum;
  }
};

// Takes the first four bytes out of each of 16 blocks, by a few loads and permutations: gathering
// them takes as long as multiplying four blocks.
template <class Block>
class HeadPicker {
 public:
  static constexpr int kBlocks = 16;

  HeadPicker() : places_(_mm512_load_si512(&kPlaces)) {}

  // Of `count` blocks, which is a constant where speed matters; the others' are zeros.
  HWY_INLINE __m512i Pick(const Block* blocks, int count) const {
    const auto* words = reinterpret_cast<const std::byte*>(blocks);
    const int there = count * kWords;
    __m512i heads = _mm512_setzero_si512();
#pragma GCC unroll 5
    for (int pair = 0; pair < kPairs; ++pair) {
      const int begin = pair * kPairWords;
      if (begin >= there) break;
      const __m512i low = Load(words, begin, there);
      const __m512i high = Load(words, begin + kPairWords / 2, there);
      heads =
          _mm512_or_si512(heads, _mm512_maskz_permutex2var_epi16(MaskOf(pair), low, places_, high));
    }
    return heads;
  }

 private:
  static constexpr int kWords = sizeof(Block) / 2;
  static constexpr int kPairWords = 64;  // of two vectors
  // The last word that is wanted, of the last block, decides how many are needed.
  static constexpr int kPairs = (kWords * (kBlocks - 1) + 2 + kPairWords - 1) / kPairWords;

  // Of word i of all heads, among those of the blocks.
  static constexpr int Place(int i) { return i / 2 * kWords + i % 2; }
  struct alignas(64) Places {
    std::uint16_t of[kPairWords / 2];
  };
  static constexpr Places FindPlaces() {
    Places places{};
    for (int i = 0; i < kPairWords / 2; ++i) {
      places.of[i] = static_cast<std::uint16_t>(Place(i) % kPairWords);
    }
    return places;
  }
  static constexpr __mmask32 MaskOf(int pair) {
    __mmask32 mask = 0;
    for (int i = 0; i < kPairWords / 2; ++i) {
      if (Place(i) / kPairWords == pair) mask |= __mmask32{1} << i;
    }
    return mask;
  }
  static HWY_INLINE __m512i Load(const std::byte* words, int begin, int there) {
    constexpr int kVectorWords = kPairWords / 2;
    const int some = std::clamp(there - begin, 0, kVectorWords);
    if (some == kVectorWords) return _mm512_loadu_si512(words + 2 * begin);
    if (some == 0) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16((__mmask32{1} << some) - 1, words + 2 * begin);
  }

  static constexpr Places kPlaces = FindPlaces();
  __m512i places_;
};

// Sums of products by lane, which are to be added. So are those of the functions below.
template <class Format>
HWY_INLINE __m512 DotSmallBlocks(const std::byte* row, const FineRow& x, int columns) {
  using Block = typename Format::Block;
  using Picker = HeadPicker<Block>;
  static_assert(Block::kElements == kFineBlock);
  constexpr int kTogether = Picker::kBlocks;  // blocks whose scales are computed at once
  const Picker picker;
  const auto* blocks = reinterpret_cast<const Block*>(row);
  const int count = columns / kFineBlock;
  Sums sums;
  sums.Clear();
  __m512 constants = _mm512_setzero_ps();
  alignas(64) float scales[kTogether];
  const auto find_scales = [&](int first, __m512i heads, __m512 x_scales, __m512 x_sums) HWY_ATTR {
    const __m512 d = WidenHalves(heads);
    _mm512_store_ps(scales, _mm512_mul_ps(d, x_scales));
    // Read from memory, one by one: otherwise gcc permutes vectors, which have enough to do.
    asm volatile("" : "+m"(scales));
    constants = Format::AddConstants(heads, d, x_sums, constants);
    FetchAhead(blocks + first, kTogether * sizeof(Block));
  };
  const auto add = [&](int chain, int first, int i) HWY_ATTR {
    sums.Add(chain, Format::Weights(blocks[first + i]), x.values + (first + i) * kFineBlock,
             _mm512_set1_ps(scales[i]));
  };
  int first = 0;
  for (; first + kTogether <= count; first += kTogether) {
    find_scales(first, picker.Pick(blocks + first, kTogether), _mm512_loadu_ps(x.scales + first),
                _mm512_loadu_ps(x.sums + first));
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) add(i % Sums::kChains, first, i);
  }
  if (const int some = count - first; some > 0) {
    const auto mask = static_cast<__mmask16>((1U << some) - 1);
    find_scales(first, picker.Pick(blocks + first, some),
                _mm512_maskz_loadu_ps(mask, x.scales + first),
                _mm512_maskz_loadu_ps(mask, x.sums + first));
    int i = 0;
    for (; i + 2 <= some; i += 2) {
      add(0, first, i);
      add(1, first, i + 1);
    }
    if (i < some) add(2, first, i);
  }
  return sums.Total(constants);
}

__m512 DotQ4K(const std::byte* row, const FineRow& x, int columns) {
  constexpr int kUnits = Q4KBlock::kUnits;
  const auto* blocks = reinterpret_cast<const Q4KBlock*>(row);
  const __m512i nibble = _mm512_set1_epi16(15);
  Sums sums;
  sums.Clear();
  __m256 constants = _mm256_setzero_ps();
  for (int b = 0; b < columns / Q4KBlock::kElements; ++b) {
    const Q4KBlock& block = blocks[b];
    FetchAhead(&block, sizeof(block));
    const Q4KScales packed = Unpack(block.scales);
    const auto widen = [](std::uint64_t bytes) HWY_ATTR {
      return _mm256_cvtepi32_ps(
          _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes))));
    };
    const auto half = [](std::uint16_t bits) HWY_ATTR {
      return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
    };
    alignas(32) float scales[kUnits];
    _mm256_store_ps(scales, _mm256_mul_ps(_mm256_mul_ps(widen(packed.scales), half(block.d)),
                                          _mm256_loadu_ps(x.scales + b * kUnits)));
    constants = _mm256_fnmadd_ps(_mm256_mul_ps(widen(packed.minima), half(block.m)),
                                 _mm256_loadu_ps(x.sums + b * kUnits), constants);
    const std::int16_t* values = x.values + b * Q4KBlock::kElements;
#pragma GCC unroll 4
    for (int pair = 0; pair < kUnits / 2; ++pair) {
      const __m512i both = WidenBytes(block.q + pair * 32);
      sums.Add(pair % 2 * 2, _mm512_and_si512(both, nibble), values + pair * 64,
               _mm512_set1_ps(scales[2 * pair]));
      sums.Add(pair % 2 * 2 + 1, _mm512_srli_epi16(both, 4), values + pair * 64 + kFineBlock,
               _mm512_set1_ps(scales[2 * pair + 1]));
    }
  }
  return sums.Total(_mm512_insertf32x8(_mm512_setzero_ps(), constants, 0));
}

__m512 DotQ6K(const std::byte* row, const FineRow& x, int columns) {
  constexpr int kUnits = Q6KBlock::kElements / kFineBlock;
  const auto* blocks = reinterpret_cast<const Q6KBlock*>(row);
  const __m512i nibble = _mm512_set1_epi16(15);
  const __m512i upper = _mm512_set1_epi16(0x30);
  const __m512i middle = _mm512_set1_epi16(32);
  const __m512i unit_of_scale = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i half_of_lane = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  Sums sums;
  sums.Clear();
  for (int b = 0; b < columns / Q6KBlock::kElements; ++b) {
    const Q6KBlock& block = blocks[b];
    FetchAhead(&block, sizeof(block));
    const __m512 x_scales = _mm512_permutexvar_ps(
        unit_of_scale, _mm512_castps256_ps512(_mm256_loadu_ps(x.scales + b * kUnits)));
    const __m512 packed = _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block.scales))));
    const __m512 d = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(block.d)));
    const __m512 scales = _mm512_mul_ps(_mm512_mul_ps(packed, d), x_scales);
    const std::int16_t* values = x.values + b * Q6KBlock::kElements;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i first = WidenBytes(block.low + half * 64);
      const __m512i second = WidenBytes(block.low + half * 64 + 32);
      const __m512i high = WidenBytes(block.high + half * 32);
      const auto add = [&](int unit, __m512i lower, __m512i bits) HWY_ATTR {
        const int at = half * 4 + unit;
        // Elements 0 to 15 of a unit have one scale, the others the next.
        const __m512 scale = _mm512_permutexvar_ps(
            _mm512_add_epi32(half_of_lane, _mm512_set1_epi32(2 * at)), scales);
        const __m512i whole = _mm512_or_si512(lower, _mm512_and_si512(bits, upper));
        sums.Add(unit, _mm512_sub_epi16(whole, middle), values + at * kFineBlock, scale);
      };
      add(0, _mm512_and_si512(first, nibble), _mm512_slli_epi16(high, 4));
      add(1, _mm512_and_si512(second, nibble), _mm512_slli_epi16(high, 2));
      add(2, _mm512_srli_epi16(first, 4), high);
      add(3, _mm512_srli_epi16(second, 4), _mm512_srli_epi16(high, 2));
    }
  }
  return sums.Total(_mm512_setzero_ps());
}

// Four rows at a time, whose sums are then added across lanes together. Missing ones are zeros.
template <__m512 (*kDot)(const std::byte* row, const FineRow& x, int columns)>
void MultiplyRows(const DotRowsArgs& args) {
  constexpr int kRows = 4;
  for (int first = 0; first < args.rows; first += kRows) {
    const std::byte* weights = args.weights + static_cast<std::size_t>(first) * args.row_bytes;
    const int rows = std::min(kRows, args.rows - first);
    for (int t = 0; t < args.tokens; ++t) {
      __m512 sums[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r] = r < rows ? kDot(weights + r * args.row_bytes, args.x[t], args.columns)
                           : _mm512_setzero_ps();
      }
      alignas(16) float totals[kRows];
      StoreSums(VF{sums[0]}, VF{sums[1]}, VF{sums[2]}, VF{sums[3]}, totals);
      std::copy_n(totals, rows, args.out + t * args.out_stride + first);
    }
  }
}

void DotRowsInVnni(const DotRowsArgs& args) noexcept {
  switch (args.format) {
    case RowFormat::kQ4_0:
      return MultiplyRows<DotSmallBlocks<Q40>>(args);
    case RowFormat::kQ4_1:
      return MultiplyRows<DotSmallBlocks<Q41>>(args);
    case RowFormat::kQ8_0:
      return MultiplyRows<DotSmallBlocks<Q80>>(args);
    case RowFormat::kQ4_K:
      return MultiplyRows<DotQ4K>(args);
    case RowFormat::kQ6_K:
      return MultiplyRows<DotQ6K>(args);
  }
}

}  // namespace

DotRowsFunction* FindDotRows() noexcept {
  return __builtin_cpu_supports("avx512vnni") != 0 ? DotRowsInVnni : DotRows;
}

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#else

HWY_BEFORE_NAMESPACE();
namespace treeline::cpu::HWY_NAMESPACE {

DotRowsFunction* FindDotRows() noexcept { return DotRows; }

}  // namespace treeline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3
