#include "treeline/dtype.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "treeline/errors.h"

namespace treeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

constexpr std::uint16_t kSignBit = 0x8000;
constexpr std::uint16_t kF16Infinity = 0x7C00;
constexpr std::uint16_t kBF16Infinity = 0x7F80;

bool IsNaNF16(int bits) { return (bits & 0x7FFF) > kF16Infinity; }
bool IsNaNBF16(int bits) { return (bits & 0x7FFF) > kBF16Infinity; }

// The value of f16 bits, from the definition of the format. Not for NaN.
double F16Value(int bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  const double sign = (bits & kSignBit) != 0 ? -1.0 : 1.0;
  if (exponent == 0x1F) return sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// The even one of two neighbouring patterns.
int Even(int a, int b) { return a % 2 == 0 ? a : b; }

TEST(DTypeTest, EveryF16PatternWidensToItsValue) {
  for (int bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = F32FromF16(static_cast<std::uint16_t>(bits));
    if (IsNaNF16(bits)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), F16Value(bits)) << bits;
      ASSERT_EQ(std::signbit(value), (bits & kSignBit) != 0) << bits;
    }
  }
}

TEST(DTypeTest, EveryF16PatternRoundTrips) {
  for (int bits = 0; bits <= 0xFFFF; ++bits) {
    const auto narrow = F16FromF32(F32FromF16(static_cast<std::uint16_t>(bits)));
    if (IsNaNF16(bits)) {
      ASSERT_TRUE(IsNaNF16(narrow)) << bits;
      ASSERT_EQ(narrow & kSignBit, bits & kSignBit) << bits;
    } else {
      ASSERT_EQ(narrow, bits);
    }
  }
}

TEST(DTypeTest, EveryBF16PatternRoundTrips) {
  for (int bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = F32FromBF16(static_cast<std::uint16_t>(bits));
    // bf16 is the upper half of f32.
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), static_cast<std::uint32_t>(bits) << 16);
    const auto narrow = BF16FromF32(value);
    if (IsNaNBF16(bits)) {
      ASSERT_TRUE(IsNaNBF16(narrow)) << bits;
      ASSERT_EQ(narrow & kSignBit, bits & kSignBit) << bits;
    } else {
      ASSERT_EQ(narrow, bits);
    }
  }
}

// Between every pair of neighbours, subnormal and normal, up to infinity (which takes the place of
// the value after the largest one).
TEST(DTypeTest, F16TiesGoToEven) {
  for (int low = 0; low < kF16Infinity; ++low) {
    const int high = low + 1;
    const double above = high == kF16Infinity ? 65536.0 : F16Value(high);
    const auto middle = static_cast<float>((F16Value(low) + above) / 2);
    for (int sign : {0, 0x8000}) {
      const float factor = sign == 0 ? 1.0f : -1.0f;
      ASSERT_EQ(F16FromF32(factor * std::nextafter(middle, 0.0f)), low | sign) << low;
      ASSERT_EQ(F16FromF32(factor * middle), Even(low, high) | sign) << low;
      ASSERT_EQ(F16FromF32(factor * std::nextafter(middle, kInfinity)), high | sign) << low;
    }
  }
}

TEST(DTypeTest, BF16TiesGoToEven) {
  for (int low = 0; low < kBF16Infinity; ++low) {
    const int high = low + 1;
    const auto middle = (static_cast<std::uint32_t>(low) << 16) + 0x8000;
    for (int sign : {0, 0x8000}) {
      const auto f32 = [&](std::uint32_t bits) {
        return std::bit_cast<float>(bits | (static_cast<std::uint32_t>(sign) << 16));
      };
      ASSERT_EQ(BF16FromF32(f32(middle - 1)), low | sign) << low;
      ASSERT_EQ(BF16FromF32(f32(middle)), Even(low, high) | sign) << low;
      ASSERT_EQ(BF16FromF32(f32(middle + 1)), high | sign) << low;
    }
  }
}

TEST(DTypeTest, TooLargeBecomesInfinity) {
  const float largest = std::numeric_limits<float>::max();
  for (float x : {65520.0f, 1e5f, largest, kInfinity}) {
    EXPECT_EQ(F16FromF32(x), kF16Infinity) << x;
    EXPECT_EQ(F16FromF32(-x), kF16Infinity | kSignBit) << x;
  }
  EXPECT_EQ(F16FromF32(65519.996f), kF16Infinity - 1);
  EXPECT_EQ(BF16FromF32(largest), kBF16Infinity);
  EXPECT_EQ(BF16FromF32(-kInfinity), kBF16Infinity | kSignBit);
}

TEST(DTypeTest, TooSmallBecomesZeroWithItsSign) {
  for (float x : {0.0f, std::numeric_limits<float>::denorm_min(), 0x1p-25f, 0x1p-126f}) {
    EXPECT_EQ(F16FromF32(x), 0) << x;
    EXPECT_EQ(F16FromF32(-x), kSignBit) << x;
  }
  EXPECT_EQ(F16FromF32(std::nextafter(0x1p-25f, 1.0f)), 1);
}

TEST(DTypeTest, EveryNaNStaysANaN) {
  // Payloads in every bit: those in the low bits must not be cut off to an infinity.
  for (int bit = 0; bit < 23; ++bit) {
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      const auto nan = std::bit_cast<float>(sign | 0x7F800000u | (1u << bit));
      EXPECT_TRUE(IsNaNF16(F16FromF32(nan))) << bit;
      EXPECT_TRUE(IsNaNBF16(BF16FromF32(nan))) << bit;
    }
  }
  const auto all_ones = std::bit_cast<float>(0x7FFFFFFFu);  // a carry would reach the sign
  EXPECT_TRUE(IsNaNF16(F16FromF32(all_ones)));
  EXPECT_TRUE(IsNaNBF16(BF16FromF32(all_ones)));
}

TEST(DTypeTest, RowsAreConvertedElementByElement) {
  const std::vector<float> source{0.0f, -0.0f, 1.0f, -2.5f, 3.14159f, 1e-6f, -65504.0f, kInfinity};
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<std::uint32_t> row(source.size());  // enough for every type, and aligned
    std::vector<float> decoded(source.size());
    EncodeRow(dtype, source, row.data());
    DecodeRow(dtype, row.data(), decoded);
    for (std::size_t i = 0; i < source.size(); ++i) {
      const float expected = dtype == DType::kF32    ? source[i]
                             : dtype == DType::kBF16 ? F32FromBF16(BF16FromF32(source[i]))
                                                     : F32FromF16(F16FromF32(source[i]));
      EXPECT_EQ(std::bit_cast<std::uint32_t>(decoded[i]), std::bit_cast<std::uint32_t>(expected))
          << Name(dtype) << " " << source[i];
    }
  }
}

constexpr std::byte kPoison{0xA5};

// Encodes and decodes; fails if anything beyond the row was written.
std::vector<float> ThroughQ8(const std::vector<float>& source) {
  const std::size_t bytes = RowBytes(DType::kQ8_0, static_cast<int>(source.size()));
  std::vector<std::byte> row(bytes + sizeof(Q8Block), kPoison);
  EncodeRow(DType::kQ8_0, source, row.data());
  EXPECT_EQ(std::count(row.begin() + static_cast<std::ptrdiff_t>(bytes), row.end(), kPoison),
            static_cast<std::ptrdiff_t>(sizeof(Q8Block)));
  std::vector<float> decoded(source.size());
  DecodeRow(DType::kQ8_0, row.data(), decoded);
  return decoded;
}

Q8Block FirstBlock(const std::vector<float>& source) {
  std::vector<std::byte> row(RowBytes(DType::kQ8_0, static_cast<int>(source.size())), kPoison);
  EncodeRow(DType::kQ8_0, source, row.data());
  Q8Block block;
  std::memcpy(&block, row.data(), sizeof(block));
  return block;
}

RC_GTEST_PROP(Q8Property, ErrorIsHalfAStep, ()) {
  const int dim = *rc::gen::inRange(1, 130);
  std::vector<float> source;
  for (int i = 0; i < dim; ++i) {
    // Blocks of very different size, down to those whose scale is subnormal or 0 in f16.
    const int exponent = -8 * (i / Q8Block::kElements) + 3;
    const auto mantissa = static_cast<float>(*rc::gen::inRange(-1000000, 1000001));
    source.push_back(std::ldexp(mantissa * 1e-6f, exponent));
  }
  const std::vector<float> decoded = ThroughQ8(source);
  for (std::size_t begin = 0; begin < source.size(); begin += Q8Block::kElements) {
    const std::size_t end = std::min(begin + Q8Block::kElements, source.size());
    double largest = 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(source[i])));
    }
    // Half a step of a scale that is itself rounded to f16: by 2^-11 of it, or, where it is
    // subnormal, by 2^-25, of which the largest element has 127.
    const double bound = 0.5 * largest / 127 * (1 + 0x1p-10) + 127 * 0x1p-25;
    for (std::size_t i = begin; i < end; ++i) {
      RC_ASSERT(std::fabs(static_cast<double>(decoded[i]) - source[i]) <= bound);
    }
  }
}

TEST(Q8Test, MultiplesOfTheScaleAreExact) {
  std::vector<float> source;
  for (int i = -127; i <= 127; ++i) {
    if (source.size() % Q8Block::kElements == 0) source.push_back(127 * 0.25f);
    source.push_back(static_cast<float>(i) * 0.25f);
  }
  EXPECT_EQ(ThroughQ8(source), source);
}

TEST(Q8Test, LargestElementUsesTheWholeRange) {
  const Q8Block block = FirstBlock({1.0f, -2.0f, 0.5f});
  EXPECT_EQ(block.scale, F16FromF32(2.0f / 127.0f));
  EXPECT_EQ(block.values[1], -127);
}

TEST(Q8Test, ShortLastBlockIsWholeAndItsSurplusIsZero) {
  for (int dim : {1, 8, 31, 33, 40, 95}) {
    std::vector<float> source(static_cast<std::size_t>(dim), 1.0f);
    source.back() = -3.0f;
    const std::vector<float> decoded = ThroughQ8(source);
    for (std::size_t i = 0; i < source.size(); ++i) {
      EXPECT_NEAR(decoded[i], source[i], 0.5 * 3.0 / 127 * 1.01) << i << " of " << dim;
    }
  }
  const Q8Block block = FirstBlock(std::vector<float>(5, 1.0f));
  for (int i = 5; i < Q8Block::kElements; ++i) EXPECT_EQ(block.values[i], 0);
}

TEST(Q8Test, AllZeroBlockIsAllZero) {
  const std::vector<float> zeros(40, 0.0f);
  EXPECT_EQ(ThroughQ8(zeros), zeros);
  const Q8Block block = FirstBlock(zeros);
  EXPECT_EQ(block.scale, 0);
  for (std::int8_t value : block.values) EXPECT_EQ(value, 0);
}

TEST(Q8Test, BlockThatIsNotFiniteBecomesNaN) {
  for (float bad : {kNaN, -kNaN, kInfinity, -kInfinity}) {
    for (std::size_t place : {std::size_t{32}, std::size_t{40}, std::size_t{63}}) {
      std::vector<float> source(70, 1.0f);
      source[place] = bad;
      const std::vector<float> decoded = ThroughQ8(source);
      for (std::size_t i = 0; i < source.size(); ++i) {
        if (i / Q8Block::kElements == 1) {
          EXPECT_TRUE(std::isnan(decoded[i])) << bad << " at " << place << ": " << i;
        } else {
          EXPECT_NEAR(decoded[i], 1.0f, 0.01) << bad << " at " << place << ": " << i;
        }
      }
    }
  }
}

TEST(DTypeTest, NamesRoundTrip) {
  for (DType dtype : kAllDTypes) EXPECT_EQ(ParseDType(Name(dtype)), dtype);
  EXPECT_EQ(Name(DType::kF32), "f32");
  EXPECT_EQ(Name(DType::kBF16), "bf16");
  EXPECT_EQ(Name(DType::kF16), "f16");
  EXPECT_EQ(Name(DType::kQ8_0), "q8_0");
}

TEST(DTypeTest, UnknownNamesAreNamedAndTheKnownListed) {
  for (const char* name : {"f64", "F32", "", "q8", "f32 "}) {
    EXPECT_THAT([&] { ParseDType(name); },
                ThrowsMessage<ArgumentError>(AllOf(HasSubstr(std::string("'") + name + "'"),
                                                   HasSubstr("f32, bf16, f16, q8_0"))));
  }
  const auto unknown = static_cast<DType>(77);
  EXPECT_THAT([&] { Name(unknown); }, ThrowsMessage<ArgumentError>(HasSubstr("77")));
  EXPECT_THAT([&] { RowBytes(unknown, 8); }, ThrowsMessage<ArgumentError>(HasSubstr("77")));
}

TEST(DTypeTest, RowBytesAndAlignment) {
  for (int dim : {0, 1, 8, 31, 32, 33, 64, 576}) {
    const auto n = static_cast<std::size_t>(dim);
    EXPECT_EQ(RowBytes(DType::kF32, dim), 4 * n);
    EXPECT_EQ(RowBytes(DType::kBF16, dim), 2 * n);
    EXPECT_EQ(RowBytes(DType::kF16, dim), 2 * n);
  }
  EXPECT_EQ(RowBytes(DType::kQ8_0, 0), 0u);
  EXPECT_EQ(RowBytes(DType::kQ8_0, 1), 34u);
  EXPECT_EQ(RowBytes(DType::kQ8_0, 32), 34u);
  EXPECT_EQ(RowBytes(DType::kQ8_0, 33), 68u);
  EXPECT_EQ(RowBytes(DType::kQ8_0, 576), 18u * 34u);
  EXPECT_EQ(Alignment(DType::kF32), 4u);
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kQ8_0}) EXPECT_EQ(Alignment(dtype), 2u);
}

}  // namespace
}  // namespace treeline
