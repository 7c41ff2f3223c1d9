// Attention of one query over three keys, checked against the answer that is known here: all keys
// score 0, so the output is the mean of the values and lse is log 3.
#include <treeline/attention.h>

#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  using namespace treeline;
  const AttentionSpec spec = AttentionSpec::Make(/*heads=*/1, /*kv_heads=*/1, /*head_dim=*/8);
  std::vector<float> q(8, 0.0f), k(3 * 8, 1.0f), v(3 * 8), out(8), lse(1);
  std::iota(v.begin(), v.end(), 0.0f);
  const AttendTask task{.q = TensorView::Dense(q.data(), DType::kF32, 1, 1, 8),
                        .q_positions = Positions::Contiguous(2, 1),
                        .kv = KvView::Strided(TensorView::Dense(k.data(), DType::kF32, 3, 1, 8),
                                              TensorView::Dense(v.data(), DType::kF32, 3, 1, 8)),
                        .kv_positions = Positions::Contiguous(0, 3),
                        .result = {out, lse, 8}};
  Attend(spec, {&task, 1});
  std::printf("out[0] = %g (expected 8), lse = %g (expected %g)\n", out[0], lse[0], std::log(3.0));
  return std::fabs(out[0] - 8.0f) < 1e-5f && std::fabs(lse[0] - std::log(3.0f)) < 1e-5f ? 0 : 1;
}
