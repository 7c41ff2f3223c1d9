#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "backend/broken_tasks.h"

namespace treeline::test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(AttendBackwardInputTest, BadSpecIsNamed) {
  ExpectErrors({
      BrokenBackward{[](Backward& b) { b.spec.softcap = -1.5f; }, "softcap", "-1.5"},
      {[](Backward& b) { b.spec.head_dim = 264; }, "head_dim is 264", "256"},
      {[](Backward& b) { b.spec.v_head_dim = 512; }, "v_head_dim 512", "256"},
  });
}

TEST(AttendBackwardInputTest, BadInputsAreNamed) {
  ExpectErrors({
      BrokenBackward{[](Backward& b) { b.gradients.q.data = nullptr; }, "q", "null"},
      {[](Backward& b) { b.gradients.q.data = Shifted(b.gradients.q.data, 1); }, "q is at",
       "4 bytes"},
      {[](Backward& b) { b.gradients.q.dtype = DType::kQ8_0; }, "q is q8_0", "f32, bf16 or f16"},
      {[](Backward& b) { b.gradients.q.heads = 2; }, "q has 2 heads", "4"},
      {[](Backward& b) { b.gradients.q.tokens = kInt64Max; }, "q", std::to_string(kInt64Max)},
      {[](Backward& b) { b.gradients.q_positions = {}; }, "3 tokens", "0 positions"},
      {[](Backward& b) { b.gradients.kv.dtype = DType::kQ8_0; }, "kv is q8_0", "f32, bf16 or f16"},
      {[](Backward& b) { b.gradients.kv.k.base = nullptr; }, "kv.k", "null"},
      {[](Backward& b) { b.gradients.kv.v.slot_stride = 4; }, "stride is 4", "96"},
      {[](Backward& b) { b.gradients.kv_positions = {}; }, "5 slots", "0 positions"},
      {[](Backward& b) { b.gradients.lse = b.gradients.lse.first(8); }, "lse has 8", "12"},
      {[](Backward& b) {
         b.gradients.lse = {static_cast<const float*>(nullptr), 12};
       },
       "lse", "null"},
  });
}

TEST(AttendBackwardInputTest, BadOutputsOfForwardAreNamed) {
  struct Field {
    std::string name;
    TensorView BackwardTask::*view;
  };
  for (const Field& field :
       {Field{"out", &BackwardTask::out}, Field{"d_out", &BackwardTask::d_out}}) {
    const std::string& name = field.name;
    const auto change = [&field](const std::function<void(TensorView&)>& edit) {
      return [edit, view = field.view](Backward& b) { edit(b.gradients.*view); };
    };
    ExpectErrors({
        BrokenBackward{change([](TensorView& t) { t.data = nullptr; }), name, "null"},
        {change([](TensorView& t) { t.data = Shifted(t.data, 2); }), name + " is at", "4 bytes"},
        {change([](TensorView& t) { t.dtype = DType::kBF16; }), name + " is bf16", "f32"},
        {change([](TensorView& t) { t.tokens = 4; }), name + " has 4 tokens", "3"},
        {change([](TensorView& t) { t.heads = 1; }), name + " has 1 heads", "4"},
        {change([](TensorView& t) { t.dim = 16; }), name + " has dim 16", "24"},
        {change([](TensorView& t) { t.token_stride = 0; }), name, "stride is 0"},
        {change([](TensorView& t) { t.head_stride = -96; }), name, "stride is -96"},
        {change([](TensorView& t) { t.token_stride = kVRow; }), name, "overlap"},
        {change([](TensorView& t) { t.token_stride = kHuge; }), name, std::to_string(kHuge)},
    });
  }
}

TEST(AttendBackwardInputTest, BadGradientsAreNamed) {
  struct Field {
    std::string name;
    GradView BackwardTask::*view;
    std::int64_t tokens;
    int heads;
    int dim;
  };
  for (const Field& field : {Field{"dq", &BackwardTask::dq, kTokens, 4, 16},
                             Field{"dk", &BackwardTask::dk, kSlots, 2, 16},
                             Field{"dv", &BackwardTask::dv, kSlots, 2, 24}}) {
    const std::string& name = field.name;
    const std::int64_t row = std::int64_t{field.dim} * 4;
    const auto change = [&field](const std::function<void(GradView&)>& edit) {
      return [edit, view = field.view](Backward& b) { edit(b.gradients.*view); };
    };
    ExpectErrors({
        BrokenBackward{change([](GradView& g) { g.data = nullptr; }), name, "null"},
        {change([](GradView& g) { g.data = const_cast<float*>(Shifted(g.data, 2)); }),
         name + " is at", "4 bytes"},
        {change([](GradView& g) { g.tokens = 7; }), name + " has 7 tokens",
         std::to_string(field.tokens)},
        {change([](GradView& g) { g.tokens = kInt64Max; }), name, std::to_string(kInt64Max)},
        {change([](GradView& g) { g.heads = 8; }), name + " has 8 heads",
         std::to_string(field.heads)},
        {change([](GradView& g) { g.dim = 8; }), name + " has dim 8", std::to_string(field.dim)},
        {change([row](GradView& g) { g.token_stride = row - 4; }), name + "'s token stride",
         std::to_string(row - 4)},
        {change([](GradView& g) { g.head_stride = 0; }), name + "'s head stride", "0 bytes"},
        {change([row](GradView& g) { g.head_stride = -row; }), name + "'s head stride",
         std::to_string(-row)},
        {change([row](GradView& g) { g.token_stride = row; }), name, "overlap"},
        {change([](GradView& g) { g.token_stride += 2; }), name, "multiple of 4"},
        {change([](GradView& g) { g.head_stride = kHuge; }), name, std::to_string(kHuge)},
    });
  }
}

TEST(SinksBackwardInputTest, BadInputsAreNamed) {
  Backward b;
  b.spec.sinks.assign(4, 0.5f);
  std::vector<float> d_sinks(4, kUntouched);
  const auto expect = [&](const AttentionSpec& spec, const TensorView& out, const TensorView& d_out,
                          std::span<const float> lse, std::span<float> target,
                          const char* message) {
    EXPECT_THAT([&] { SinksBackward(spec, out, d_out, lse, target); },
                ThrowsMessage<ArgumentError>(HasSubstr(message)));
    EXPECT_THAT(d_sinks, Each(kUntouched));
  };
  const BackwardTask& g = b.gradients;
  AttentionSpec no_sinks = b.spec;
  no_sinks.sinks.clear();
  TensorView short_out = g.out, null_out = g.out;
  short_out.tokens = 2;
  null_out.data = nullptr;
  const std::span<float> target(d_sinks);
  expect(no_sinks, g.out, g.d_out, g.lse, target, "no sinks");
  expect(b.spec, g.out, g.d_out, g.lse, target.first(3), "d_sinks has 3");
  expect(b.spec, g.out, g.d_out, g.lse.first(10), target, "lse has 10");
  expect(b.spec, short_out, g.d_out, g.lse, target, "d_out has 3 tokens");
  expect(b.spec, null_out, g.d_out, g.lse, target, "out is null");
  SinksBackward(b.spec, g.out, g.d_out, g.lse, target);
  EXPECT_NE(d_sinks[0], kUntouched);
}

}  // namespace
}  // namespace treeline::test
