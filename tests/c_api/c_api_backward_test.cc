#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "c_api/c_api_problem.h"

namespace treeline::test {
namespace {

// A problem with its forward pass done, and gradients that start at different values.
struct BackwardProblem : Problem {
  explicit BackwardProblem(DType type = DType::kF32) : Problem(type) {
    Attend(spec, {&task, 1});
    const auto slot_rows = static_cast<std::size_t>(slots) * kKvHeads;
    d_out = Random(rows() * kValueDim, 4);
    dq = c_dq = Random(rows() * kDim, 5);
    dk = c_dk = Random(slot_rows * kDim, 6);
    dv = c_dv = Random(slot_rows * kValueDim, 7);
    before = c_dq;
    c_backward = {
        .q = c_task.q,
        .q_positions = c_task.q_positions,
        .kv = c_task.kv,
        .kv_positions = c_task.kv_positions,
        .out = treeline_tensor_dense(out.data(), TREELINE_F32, tokens, kHeads, kValueDim),
        .d_out = treeline_tensor_dense(d_out.data(), TREELINE_F32, tokens, kHeads, kValueDim),
        .lse = lse.data(),
        .lse_count = lse.size(),
        .dq = treeline_gradient_dense(c_dq.data(), tokens, kHeads, kDim),
        .dk = treeline_gradient_dense(c_dk.data(), slots, kKvHeads, kDim),
        .dv = treeline_gradient_dense(c_dv.data(), slots, kKvHeads, kValueDim)};
    backward = {.q = task.q,
                .q_positions = task.q_positions,
                .kv = task.kv,
                .kv_positions = task.kv_positions,
                .out = TensorView::Dense(out.data(), DType::kF32, tokens, kHeads, kValueDim),
                .d_out = TensorView::Dense(d_out.data(), DType::kF32, tokens, kHeads, kValueDim),
                .lse = lse,
                .dq = GradView::Dense(dq.data(), tokens, kHeads, kDim),
                .dk = GradView::Dense(dk.data(), slots, kKvHeads, kDim),
                .dv = GradView::Dense(dv.data(), slots, kKvHeads, kValueDim)};
  }

  std::vector<float> d_out, dq, dk, dv, c_dq, c_dk, c_dv, before;
  treeline_backward_task c_backward;
  BackwardTask backward;
};

TEST(CApiBackward, MatchesTheCppApi) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int threads : {1, 3}) {
      SCOPED_TRACE(testing::Message() << Name(dtype) << ", " << threads << " threads");
      BackwardProblem p(dtype);
      const ContextPtr context = MakeContext(threads);
      ASSERT_TRUE(Succeeds(treeline_attend_backward(context.get(), &p.c_spec, &p.c_backward, 1)));
      AttendBackward(p.spec, {&p.backward, 1});
      EXPECT_TRUE(SameBits(p.c_dq, p.dq));
      EXPECT_TRUE(SameBits(p.c_dk, p.dk));
      EXPECT_TRUE(SameBits(p.c_dv, p.dv));
      EXPECT_FALSE(SameBits(p.c_dq, p.before));
    }
  }
}

TEST(CApiBackward, RejectsBadArguments) {
  const ContextPtr context = MakeContext();
  BackwardProblem good;
  EXPECT_TRUE(Rejects(treeline_attend_backward(nullptr, &good.c_spec, &good.c_backward, 1),
                      "context is null"));
  EXPECT_TRUE(Rejects(treeline_attend_backward(context.get(), nullptr, &good.c_backward, 1),
                      "spec is null"));
  EXPECT_TRUE(
      Rejects(treeline_attend_backward(context.get(), &good.c_spec, nullptr, 1), "tasks is null"));
  EXPECT_TRUE(Succeeds(treeline_attend_backward(context.get(), &good.c_spec, nullptr, 0)));
  const std::vector<std::pair<const char*, std::function<void(BackwardProblem&)>>> mistakes{
      {"v_head_dim 264", [](auto& p) { p.c_spec.v_head_dim = 264; }},
      {"scale is nan", [](auto& p) { p.c_spec.scale = kNan; }},
      {"q is null", [](auto& p) { p.c_backward.q.data = nullptr; }},
      {"tasks[0].q.dtype is 9", [](auto& p) { p.c_backward.q.dtype = 9; }},
      {"tasks[0].q_positions: count is -1",
       [](auto& p) { p.c_backward.q_positions.segments[0].count = -1; }},
      {"kv.k is null", [](auto& p) { p.c_backward.kv.k.base = nullptr; }},
      {"tasks[0].kv.dtype is 9", [](auto& p) { p.c_backward.kv.dtype = 9; }},
      {"tasks[0].kv_positions: run is -2",
       [](auto& p) { p.c_backward.kv_positions.segments[0].run = -2; }},
      {"kv is q8_0",
       [](auto& p) {
         p.c_backward.kv = treeline_kv_dense(p.k.data(), p.v.data(), TREELINE_Q8_0, p.slots,
                                             p.kKvHeads, p.kDim, p.kValueDim);
       }},
      {"tasks[0].out.dtype is 4", [](auto& p) { p.c_backward.out.dtype = 4; }},
      {"out is bf16", [](auto& p) { p.c_backward.out.dtype = TREELINE_BF16; }},
      {"out is null", [](auto& p) { p.c_backward.out.data = nullptr; }},
      {"tasks[0].d_out.dtype is 4", [](auto& p) { p.c_backward.d_out.dtype = 4; }},
      {"d_out is null", [](auto& p) { p.c_backward.d_out.data = nullptr; }},
      {"d_out has 2 tokens", [](auto& p) { p.c_backward.d_out.tokens = 2; }},
      {"tasks[0].lse is null", [](auto& p) { p.c_backward.lse = nullptr; }},
      {"lse has 5 values", [](auto& p) { p.c_backward.lse_count = 5; }},
      {"dq is null", [](auto& p) { p.c_backward.dq.data = nullptr; }},
      {"dk has dim 24", [](auto& p) { p.c_backward.dk.dim = 24; }},
      {"dv has 69 tokens", [](auto& p) { p.c_backward.dv.tokens = 69; }},
      {"dv's head stride is 4", [](auto& p) { p.c_backward.dv.head_stride = 4; }},
  };
  for (const auto& [message, make] : mistakes) {
    BackwardProblem p;
    make(p);
    EXPECT_TRUE(
        Rejects(treeline_attend_backward(context.get(), &p.c_spec, &p.c_backward, 1), message));
    EXPECT_TRUE(SameBits(p.c_dq, p.before)) << message;
  }
}

TEST(CApiBackward, SinksMatchTheCppApi) {
  BackwardProblem p;
  p.spec.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  p.c_spec.sinks = p.spec.sinks.data();
  p.c_spec.sinks_count = p.spec.sinks.size();
  std::vector<float> c_d_sinks{1.0f, 2.0f, 3.0f, 4.0f}, d_sinks = c_d_sinks;
  const std::vector<float> before = c_d_sinks;
  const auto run = [&](const treeline_tensor* out, const treeline_tensor* d_out, const float* lse,
                       std::size_t lse_count, float* target, std::size_t count) {
    return treeline_sinks_backward(&p.c_spec, out, d_out, lse, lse_count, target, count);
  };
  const treeline_tensor* out = &p.c_backward.out;
  const treeline_tensor* d_out = &p.c_backward.d_out;
  const float* lse = p.lse.data();
  const std::size_t rows = p.rows();
  float* target = c_d_sinks.data();
  EXPECT_TRUE(
      Rejects(treeline_sinks_backward(nullptr, out, d_out, lse, rows, target, 4), "spec is null"));
  EXPECT_TRUE(Rejects(run(nullptr, d_out, lse, rows, target, 4), "out is null"));
  EXPECT_TRUE(Rejects(run(out, nullptr, lse, rows, target, 4), "d_out is null"));
  EXPECT_TRUE(Rejects(run(out, d_out, nullptr, rows, target, 4), "lse is null"));
  EXPECT_TRUE(Rejects(run(out, d_out, lse, rows - 1, target, 4), "lse has 11 values"));
  EXPECT_TRUE(Rejects(run(out, d_out, lse, rows, nullptr, 4), "d_sinks is null"));
  EXPECT_TRUE(Rejects(run(out, d_out, lse, rows, target, 3), "d_sinks has 3 values"));
  treeline_tensor bad = *out;
  bad.dtype = 7;
  EXPECT_TRUE(Rejects(run(&bad, d_out, lse, rows, target, 4), "out.dtype is 7"));
  EXPECT_TRUE(Rejects(run(out, &bad, lse, rows, target, 4), "d_out.dtype is 7"));
  EXPECT_TRUE(SameBits(c_d_sinks, before));

  ASSERT_TRUE(Succeeds(run(out, d_out, lse, rows, target, 4)));
  SinksBackward(p.spec, p.backward.out, p.backward.d_out, p.lse, d_sinks);
  EXPECT_TRUE(SameBits(c_d_sinks, d_sinks));
  EXPECT_FALSE(SameBits(c_d_sinks, before));

  p.c_spec.sinks_count = 0;
  EXPECT_TRUE(Rejects(run(out, d_out, lse, rows, target, 4), "no sinks"));
}

}  // namespace
}  // namespace treeline::test
