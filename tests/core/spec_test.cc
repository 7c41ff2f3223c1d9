#include "treeline/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "treeline/errors.h"

namespace treeline {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One change to a valid spec, and what the error must say.
struct Invalid {
  std::function<void(AttentionSpec&)> change;
  std::string message;
};

void ExpectNamed(const std::vector<Invalid>& cases) {
  for (const auto& [change, message] : cases) {
    AttentionSpec spec = AttentionSpec::Make(6, 2, 64);
    ASSERT_NO_THROW(Validate(spec));
    change(spec);
    EXPECT_THAT([&] { Validate(spec); }, ThrowsMessage<ArgumentError>(HasSubstr(message)));
  }
}

TEST(SpecTest, MakeIsTheUsualSpec) {
  const AttentionSpec spec = AttentionSpec::Make(6, 2, 64);
  EXPECT_EQ(spec.heads, 6);
  EXPECT_EQ(spec.kv_heads, 2);
  EXPECT_EQ(spec.group(), 3);
  EXPECT_EQ(spec.head_dim, 64);
  EXPECT_EQ(spec.v_head_dim, 64);
  EXPECT_EQ(spec.scale, 0.125f);
  EXPECT_FALSE(spec.causal);
  EXPECT_EQ(spec.window, 0);
  EXPECT_EQ(spec.softcap, 0.0f);
  EXPECT_NO_THROW(Validate(spec));
}

TEST(SpecTest, EveryValueInRangeIsAccepted) {
  for (int dim = 8; dim <= AttentionSpec::kMaxHeadDim; dim += 8) {
    AttentionSpec spec = AttentionSpec::Make(4, 1, dim);
    EXPECT_NO_THROW(Validate(spec)) << dim;
    spec.v_head_dim = AttentionSpec::kMaxHeadDim + 8 - dim;
    EXPECT_NO_THROW(Validate(spec)) << dim;
  }
  AttentionSpec spec = AttentionSpec::Make(AttentionSpec::kMaxHeads, 1, 8);
  EXPECT_NO_THROW(Validate(spec));
  spec = AttentionSpec::Make(3, 3, 8);
  spec.scale = -0.0f;
  spec.window = std::numeric_limits<std::int64_t>::max();
  spec.softcap = std::numeric_limits<float>::max();
  spec.alibi_slopes = {0.0f, -1.0f, 2.0f};
  spec.sinks = {-1e30f, 0.0f, 1e30f};
  EXPECT_NO_THROW(Validate(spec));
}

TEST(SpecTest, BadHeadsAreNamed) {
  ExpectNamed({
      {[](AttentionSpec& s) { s.heads = 0; }, "heads is 0"},
      {[](AttentionSpec& s) { s.heads = -1; }, "heads is -1"},
      {[](AttentionSpec& s) { s.heads = AttentionSpec::kMaxHeads + 1; }, "heads is 65537"},
      {[](AttentionSpec& s) { s.kv_heads = 0; }, "kv_heads is 0"},
      {[](AttentionSpec& s) { s.kv_heads = -2; }, "kv_heads is -2"},
      {[](AttentionSpec& s) { s.kv_heads = 4; }, "kv_heads is 4"},
      {[](AttentionSpec& s) { s.kv_heads = 12; }, "kv_heads is 12"},
  });
}

TEST(SpecTest, BadHeadDimsAreNamed) {
  for (int dim : {0, 4, 12, 584, -8, std::numeric_limits<int>::max()}) {
    const std::string is_dim = "head_dim is " + std::to_string(dim);
    ExpectNamed({{[dim](AttentionSpec& s) { s.head_dim = dim; }, is_dim},
                 {[dim](AttentionSpec& s) { s.v_head_dim = dim; }, "v_" + is_dim}});
  }
}

TEST(SpecTest, BadNumbersAreNamed) {
  ExpectNamed({
      {[](AttentionSpec& s) { s.scale = kNaN; }, "scale is nan"},
      {[](AttentionSpec& s) { s.scale = kInfinity; }, "scale is inf"},
      {[](AttentionSpec& s) { s.scale = -kInfinity; }, "scale is -inf"},
      {[](AttentionSpec& s) { s.window = -1; }, "window is -1"},
      {[](AttentionSpec& s) { s.window = std::numeric_limits<std::int64_t>::min(); },
       "window is -9223372036854775808"},
      {[](AttentionSpec& s) { s.bf16_terms = -1; }, "bf16_terms is -1"},
      {[](AttentionSpec& s) { s.bf16_terms = 3; }, "bf16_terms is 3"},
      {[](AttentionSpec& s) { s.softcap = -0.5f; }, "softcap is -0.5"},
      {[](AttentionSpec& s) { s.softcap = kNaN; }, "softcap is nan"},
      {[](AttentionSpec& s) { s.softcap = kInfinity; }, "softcap is inf"},
  });
}

TEST(SpecTest, BadPerHeadValuesAreNamed) {
  struct Field {
    std::string name;
    std::vector<float> AttentionSpec::*values;
  };
  for (const Field& field : {Field{"alibi_slopes", &AttentionSpec::alibi_slopes},
                             Field{"sinks", &AttentionSpec::sinks}}) {
    for (std::size_t size : {std::size_t{1}, std::size_t{2}, std::size_t{5}, std::size_t{7}}) {
      ExpectNamed({{[&](AttentionSpec& s) { (s.*field.values).assign(size, 0.5f); },
                    field.name + " has " + std::to_string(size) + " values"}});
    }
    for (float bad : {kNaN, kInfinity, -kInfinity}) {
      const std::string text = std::isnan(bad) ? "nan" : bad > 0 ? "inf" : "-inf";
      ExpectNamed({{[&](AttentionSpec& s) {
                      (s.*field.values).assign(6, 0.5f);
                      (s.*field.values)[4] = bad;
                    },
                    field.name + "[4] is " + text}});
    }
  }
}

}  // namespace
}  // namespace treeline
