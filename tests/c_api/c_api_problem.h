#pragma once

// What the tests of the C API share: a small problem as both APIs see it, and how outcomes are
// judged.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "treeline/attention.h"
#include "treeline/c_api.h"

namespace treeline::test {

inline constexpr float kPoison = 12345.0f;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline testing::AssertionResult Succeeds(treeline_status status) {
  if (status == TREELINE_OK) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "error " << status << ": " << treeline_last_error();
}

inline testing::AssertionResult Rejects(treeline_status status, std::string_view message) {
  if (status != TREELINE_ERROR_ARGUMENT) {
    return testing::AssertionFailure() << "status is " << status;
  }
  if (std::string_view(treeline_last_error()).find(message) == std::string_view::npos) {
    return testing::AssertionFailure()
           << "'" << treeline_last_error() << "' does not say '" << message << "'";
  }
  return testing::AssertionSuccess();
}

inline testing::AssertionResult SameBits(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) {
    return testing::AssertionFailure() << a.size() << " values and " << b.size();
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return testing::AssertionFailure() << "at " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return testing::AssertionSuccess();
}

inline bool Untouched(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == kPoison; });
}

inline std::vector<float> Random(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(engine);
  return values;
}

inline std::vector<std::byte> RandomRows(DType dtype, std::size_t rows, int dim, unsigned seed) {
  const std::size_t bytes = RowBytes(dtype, dim);
  const auto width = static_cast<std::size_t>(dim);
  const std::vector<float> values = Random(rows * width, seed);
  std::vector<std::byte> encoded(rows * bytes);
  for (std::size_t row = 0; row < rows; ++row) {
    EncodeRow(dtype, std::span(values).subspan(row * width, width), encoded.data() + row * bytes);
  }
  return encoded;
}

struct DestroyContext {
  void operator()(treeline_context* context) const { treeline_context_destroy(context); }
};
using ContextPtr = std::unique_ptr<treeline_context, DestroyContext>;

inline ContextPtr MakeContext(int threads = 1, const char* isa = nullptr) {
  treeline_context* context = nullptr;
  EXPECT_TRUE(Succeeds(treeline_context_create(TREELINE_ABI_VERSION, threads, isa, &context)));
  return ContextPtr(context);
}

// One small problem, as the two APIs see it. Results start poisoned.
struct Problem {
  static constexpr int kHeads = 4;
  static constexpr int kKvHeads = 2;
  static constexpr int kDim = 16;
  static constexpr int kValueDim = 24;

  explicit Problem(DType type = DType::kF32, int query_tokens = 3, int key_slots = 70)
      : dtype(type), tokens(query_tokens), slots(key_slots) {
    EXPECT_TRUE(Succeeds(treeline_spec_init(&c_spec, kHeads, kKvHeads, kDim)));
    c_spec.v_head_dim = kValueDim;
    c_spec.causal = 1;
    spec = AttentionSpec::Make(kHeads, kKvHeads, kDim);
    spec.v_head_dim = kValueDim;
    spec.causal = true;
  }

  std::size_t rows() const { return static_cast<std::size_t>(tokens) * kHeads; }

  treeline_attend_task CTask(std::vector<float>& to_out, std::vector<float>& to_lse) const {
    return {.q = treeline_tensor_dense(q.data(), TREELINE_F32, tokens, kHeads, kDim),
            .q_positions = treeline_positions_contiguous(slots - tokens, tokens),
            .kv = treeline_kv_dense(k.data(), v.data(), static_cast<treeline_dtype>(dtype), slots,
                                    kKvHeads, kDim, kValueDim),
            .kv_positions = treeline_positions_contiguous(0, slots),
            .result = {to_out.data(), to_lse.data(), static_cast<std::int64_t>(rows()), kValueDim}};
  }

  AttendTask Task(std::vector<float>& to_out, std::vector<float>& to_lse) const {
    return {.q = TensorView::Dense(q.data(), DType::kF32, tokens, kHeads, kDim),
            .q_positions = Positions::Contiguous(slots - tokens, tokens),
            .kv = KvView::Strided(TensorView::Dense(k.data(), dtype, slots, kKvHeads, kDim),
                                  TensorView::Dense(v.data(), dtype, slots, kKvHeads, kValueDim)),
            .kv_positions = Positions::Contiguous(0, slots),
            .result = {to_out, to_lse, kValueDim}};
  }

  DType dtype;
  int tokens;
  int slots;
  treeline_spec c_spec;
  AttentionSpec spec;
  std::vector<float> q = Random(rows() * kDim, 1);
  std::vector<std::byte> k = RandomRows(dtype, static_cast<std::size_t>(slots) * kKvHeads, kDim, 2);
  std::vector<std::byte> v =
      RandomRows(dtype, static_cast<std::size_t>(slots) * kKvHeads, kValueDim, 3);
  std::vector<float> c_out = std::vector<float>(rows() * kValueDim, kPoison);
  std::vector<float> c_lse = std::vector<float>(rows(), kPoison);
  std::vector<float> out = c_out;
  std::vector<float> lse = c_lse;
  treeline_attend_task c_task = CTask(c_out, c_lse);
  AttendTask task = Task(out, lse);
};

}  // namespace treeline::test
