#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <latch>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "c_api/c_api_problem.h"
#include "treeline/c_api.h"
#include "treeline/memory.h"
#include "treeline/thread_pool.h"

namespace treeline::test {
namespace {

// Bindings in other languages repeat these numbers.
static_assert(TREELINE_F32 == 0 && TREELINE_BF16 == 1 && TREELINE_F16 == 2 && TREELINE_Q8_0 == 3);
static_assert(TREELINE_OK == 0 && TREELINE_ERROR_ARGUMENT == 1 && TREELINE_ERROR_COMM == 2 &&
              TREELINE_ERROR_FORMAT == 3 && TREELINE_ERROR_DEVICE == 4 &&
              TREELINE_ERROR_MEMORY == 5 && TREELINE_ERROR_INTERNAL == 6);
// If one of these fails, TREELINE_ABI_VERSION has to grow.
static_assert(sizeof(void*) != 8 ||
              (TREELINE_ABI_VERSION == 2 && sizeof(treeline_spec) == 80 &&
               sizeof(treeline_tensor) == 48 && sizeof(treeline_gradient) == 40 &&
               sizeof(treeline_kv) == 104 && sizeof(treeline_positions) == 64 &&
               sizeof(treeline_partial) == 32 && sizeof(treeline_attend_task) == 312 &&
               sizeof(treeline_backward_task) == 512));

TEST(CApi, VersionHasThreeNumbers) {
  int major = 0, minor = 0, patch = 0;
  char surplus = 0;
  EXPECT_EQ(std::sscanf(treeline_version(), "%d.%d.%d%c", &major, &minor, &patch, &surplus), 3);
}

TEST(CApiContext, UsesTheDefaultIsa) {
  const ContextPtr context = MakeContext();
  const char* isa = nullptr;
  ASSERT_TRUE(Succeeds(treeline_context_isa(context.get(), &isa)));
  EXPECT_EQ(isa, Name(DefaultIsa()));
}

TEST(CApiContext, UsesTheIsaThatIsNamed) {
  for (Isa each : AttainableIsas()) {
    const ContextPtr context = MakeContext(1, std::string(Name(each)).c_str());
    const char* isa = nullptr;
    ASSERT_TRUE(Succeeds(treeline_context_isa(context.get(), &isa)));
    EXPECT_EQ(isa, Name(each));
  }
}

TEST(CApiContext, CountsMemoryAsTheCppApiDoes) {
  Problem p;
  const ContextPtr context = MakeContext();
  std::size_t bytes = 1;
  ASSERT_TRUE(Succeeds(treeline_context_peak_bytes(context.get(), &bytes)));
  EXPECT_EQ(bytes, 0u);
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &p.c_spec, &p.c_task, 1)));
  ASSERT_TRUE(Succeeds(treeline_context_peak_bytes(context.get(), &bytes)));
  MemoryTracker memory;
  Attend(p.spec, {&p.task, 1}, {.memory = &memory, .isa = {}});
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(bytes, memory.peak());
  ASSERT_TRUE(Succeeds(treeline_context_reset_peak(context.get())));
  ASSERT_TRUE(Succeeds(treeline_context_peak_bytes(context.get(), &bytes)));
  EXPECT_EQ(bytes, 0u);
}

TEST(CApiContext, RejectsWhatItCannotUse) {
  const auto create = [](int abi, int threads, const char* isa) {
    treeline_context* context = nullptr;
    const treeline_status status = treeline_context_create(abi, threads, isa, &context);
    EXPECT_EQ(context, nullptr);  // not written
    return status;
  };
  constexpr int kAbi = TREELINE_ABI_VERSION;
  EXPECT_TRUE(Rejects(create(kAbi + 1, 1, nullptr), "abi_version is " + std::to_string(kAbi + 1)));
  EXPECT_TRUE(Rejects(create(kAbi, 0, nullptr), "threads is 0"));
  EXPECT_TRUE(Rejects(create(kAbi, -1, nullptr), "threads is -1"));
  EXPECT_TRUE(Rejects(create(kAbi, ThreadPool::kMaxThreads + 1, nullptr), "threads is 4097"));
  EXPECT_TRUE(Rejects(create(kAbi, 1, "mmx"), "mmx"));
  EXPECT_TRUE(Rejects(create(kAbi, 1, ""), "''"));
}

TEST(CApiContext, RejectsNull) {
  const ContextPtr context = MakeContext();
  const char* isa = nullptr;
  std::size_t bytes = 0;
  EXPECT_TRUE(Rejects(treeline_context_create(TREELINE_ABI_VERSION, 1, nullptr, nullptr),
                      "context is null"));
  EXPECT_TRUE(Rejects(treeline_context_isa(nullptr, &isa), "context is null"));
  EXPECT_TRUE(Rejects(treeline_context_isa(context.get(), nullptr), "isa is null"));
  EXPECT_TRUE(Rejects(treeline_context_peak_bytes(nullptr, &bytes), "context is null"));
  EXPECT_TRUE(Rejects(treeline_context_peak_bytes(context.get(), nullptr), "bytes is null"));
  EXPECT_TRUE(Rejects(treeline_context_reset_peak(nullptr), "context is null"));
  treeline_context_destroy(nullptr);
}

TEST(CApiContext, MayBeSharedByThreads) {
  constexpr int kCallers = 4;
  const ContextPtr context = MakeContext(2);
  Problem alone(DType::kF32, 1, 2000);  // enough for both threads of the context
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &alone.c_spec, &alone.c_task, 1)));
  std::latch all_ready(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      Problem p(DType::kF32, 1, 2000);
      all_ready.arrive_and_wait();
      for (int i = 0; i < 50; ++i) {
        std::fill(p.c_out.begin(), p.c_out.end(), kPoison);
        EXPECT_TRUE(Succeeds(treeline_attend(context.get(), &p.c_spec, &p.c_task, 1)));
        EXPECT_TRUE(SameBits(p.c_out, alone.c_out));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(CApiRows, MatchTheCppApi) {
  const std::vector<float> source = Random(40, 1);
  for (DType dtype : kAllDTypes) {
    SCOPED_TRACE(Name(dtype));
    const auto c_dtype = static_cast<treeline_dtype>(dtype);
    std::size_t bytes = 0;
    ASSERT_TRUE(Succeeds(treeline_row_bytes(c_dtype, 40, &bytes)));
    ASSERT_EQ(bytes, RowBytes(dtype, 40));
    std::vector<std::byte> c_row(bytes), row(bytes);
    ASSERT_TRUE(Succeeds(treeline_encode_row(c_dtype, source.data(), 40, c_row.data())));
    EncodeRow(dtype, source, row.data());
    EXPECT_EQ(c_row, row);
    std::vector<float> c_target(40), target(40);
    ASSERT_TRUE(Succeeds(treeline_decode_row(c_dtype, c_row.data(), 40, c_target.data())));
    DecodeRow(dtype, row.data(), target);
    EXPECT_TRUE(SameBits(c_target, target));
  }
}

TEST(CApiRows, RejectBadArguments) {
  std::array<float, 8> values{};
  std::array<std::uint16_t, 10> row{};
  std::size_t bytes = 0;
  for (treeline_dtype dtype : {-1, 4, 1 << 30}) {
    const std::string message = "dtype is " + std::to_string(dtype);
    EXPECT_TRUE(Rejects(treeline_row_bytes(dtype, 8, &bytes), message));
    EXPECT_TRUE(Rejects(treeline_encode_row(dtype, values.data(), 8, row.data()), message));
    EXPECT_TRUE(Rejects(treeline_decode_row(dtype, row.data(), 8, values.data()), message));
  }
  constexpr treeline_dtype kType = TREELINE_BF16;
  EXPECT_TRUE(Rejects(treeline_row_bytes(kType, -1, &bytes), "dim is -1"));
  EXPECT_TRUE(Rejects(treeline_encode_row(kType, values.data(), -1, row.data()), "dim is -1"));
  EXPECT_TRUE(Rejects(treeline_decode_row(kType, row.data(), -1, values.data()), "dim is -1"));
  EXPECT_TRUE(Rejects(treeline_row_bytes(kType, 8, nullptr), "bytes is null"));
  EXPECT_TRUE(Rejects(treeline_encode_row(kType, nullptr, 8, row.data()), "source is null"));
  EXPECT_TRUE(Rejects(treeline_encode_row(kType, values.data(), 8, nullptr), "row is null"));
  EXPECT_TRUE(Rejects(treeline_decode_row(kType, nullptr, 8, values.data()), "row is null"));
  EXPECT_TRUE(Rejects(treeline_decode_row(kType, row.data(), 8, nullptr), "target is null"));
  std::byte* odd = reinterpret_cast<std::byte*>(row.data()) + 1;
  EXPECT_TRUE(Rejects(treeline_encode_row(kType, values.data(), 8, odd), "row is at"));
  EXPECT_TRUE(Rejects(treeline_decode_row(kType, odd, 8, values.data()), "row is at"));
}

TEST(CApiSpec, InitGivesTheUsualSpec) {
  treeline_spec spec;
  std::memset(&spec, 0xFF, sizeof(spec));
  ASSERT_TRUE(Succeeds(treeline_spec_init(&spec, 6, 2, 64)));
  const AttentionSpec usual = AttentionSpec::Make(6, 2, 64);
  EXPECT_EQ(spec.heads, usual.heads);
  EXPECT_EQ(spec.kv_heads, usual.kv_heads);
  EXPECT_EQ(spec.head_dim, usual.head_dim);
  EXPECT_EQ(spec.v_head_dim, usual.v_head_dim);
  EXPECT_EQ(spec.scale, usual.scale);
  EXPECT_EQ(spec.softcap, usual.softcap);
  EXPECT_EQ(spec.window, usual.window);
  EXPECT_EQ(spec.causal, 0);
  EXPECT_EQ(spec.alibi_slopes, nullptr);
  EXPECT_EQ(spec.alibi_slopes_count, 0u);
  EXPECT_EQ(spec.sinks, nullptr);
  EXPECT_EQ(spec.sinks_count, 0u);
  EXPECT_EQ(spec.bf16_terms, 0);
  EXPECT_EQ(spec.int8_queries, 0);
}

TEST(CApiSpec, InitRejectsBadShapes) {
  treeline_spec spec{};
  EXPECT_TRUE(Rejects(treeline_spec_init(nullptr, 6, 2, 64), "spec is null"));
  EXPECT_TRUE(Rejects(treeline_spec_init(&spec, 6, 4, 64), "kv_heads is 4"));
  EXPECT_TRUE(Rejects(treeline_spec_init(&spec, 0, 1, 64), "heads is 0"));
  EXPECT_TRUE(Rejects(treeline_spec_init(&spec, 6, 2, 63), "head_dim is 63"));
  EXPECT_TRUE(Rejects(treeline_spec_init(&spec, 6, 2, -64), "head_dim is -64"));
  EXPECT_EQ(spec.heads, 0);  // not written
}

TEST(CApiViews, DenseHelpersNeverFail) {
  constexpr std::int32_t kLargest = std::numeric_limits<std::int32_t>::max();
  constexpr std::int64_t kLargest64 = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(treeline_tensor_dense(nullptr, 77, 1, 1, 8).head_stride, 0);
  EXPECT_EQ(treeline_tensor_dense(nullptr, TREELINE_F32, 1, 1, -8).head_stride, 0);
  EXPECT_EQ(treeline_gradient_dense(nullptr, 1, 1, -8).head_stride, 0);
  EXPECT_EQ(treeline_gradient_dense(nullptr, 1, kLargest, kLargest).token_stride, 0);  // overflow
  EXPECT_EQ(treeline_kv_dense(nullptr, nullptr, -1, 1, 1, 8, 8).k.slot_stride, 0);
  const void* const* no_pages = nullptr;
  EXPECT_EQ(
      treeline_kv_paged(no_pages, no_pages, 0, TREELINE_F32, 0, kLargest64, 1, 8, 8).v.head_stride,
      0);
  EXPECT_EQ(treeline_positions_contiguous(5, -1).segments[0].count, -1);
}

}  // namespace
}  // namespace treeline::test
