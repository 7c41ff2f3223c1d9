#include "treeline/c_api.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <latch>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "c_api/guard.h"
#include "treeline/attention.h"
#include "treeline/memory.h"
#include "treeline/thread_pool.h"

namespace treeline {
namespace {

constexpr float kPoison = 12345.0f;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Bindings in other languages repeat these numbers.
static_assert(TREELINE_F32 == 0 && TREELINE_BF16 == 1 && TREELINE_F16 == 2 && TREELINE_Q8_0 == 3);
static_assert(TREELINE_OK == 0 && TREELINE_ERROR_ARGUMENT == 1 && TREELINE_ERROR_COMM == 2 &&
              TREELINE_ERROR_FORMAT == 3 && TREELINE_ERROR_DEVICE == 4 &&
              TREELINE_ERROR_MEMORY == 5 && TREELINE_ERROR_INTERNAL == 6);
// If one of these fails, TREELINE_ABI_VERSION has to grow.
static_assert(sizeof(void*) != 8 ||
              (TREELINE_ABI_VERSION == 1 && sizeof(treeline_spec) == 72 &&
               sizeof(treeline_tensor) == 48 && sizeof(treeline_gradient) == 40 &&
               sizeof(treeline_kv) == 104 && sizeof(treeline_positions) == 64 &&
               sizeof(treeline_partial) == 32 && sizeof(treeline_attend_task) == 312 &&
               sizeof(treeline_backward_task) == 512));

testing::AssertionResult Succeeds(treeline_status status) {
  if (status == TREELINE_OK) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "error " << status << ": " << treeline_last_error();
}

testing::AssertionResult Rejects(treeline_status status, std::string_view message) {
  if (status != TREELINE_ERROR_ARGUMENT) {
    return testing::AssertionFailure() << "status is " << status;
  }
  if (std::string_view(treeline_last_error()).find(message) == std::string_view::npos) {
    return testing::AssertionFailure()
           << "'" << treeline_last_error() << "' does not say '" << message << "'";
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SameBits(std::span<const float> a, std::span<const float> b) {
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

bool Untouched(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == kPoison; });
}

std::vector<float> Random(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(engine);
  return values;
}

std::vector<std::byte> RandomRows(DType dtype, std::size_t rows, int dim, unsigned seed) {
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

ContextPtr MakeContext(int threads = 1, const char* isa = nullptr) {
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

// Both APIs compute the problem, with the same resources.
void ExpectSameAttention(Problem& p, int threads = 1, const char* isa = nullptr) {
  const ContextPtr context = MakeContext(threads, isa);
  ThreadPool pool(threads);
  Context cpp{.pool = &pool, .isa = {}};
  if (isa != nullptr) cpp.isa = ParseIsa(isa);
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &p.c_spec, &p.c_task, 1)));
  Attend(p.spec, {&p.task, 1}, cpp);
  EXPECT_TRUE(SameBits(p.c_out, p.out));
  EXPECT_TRUE(SameBits(p.c_lse, p.lse));
  EXPECT_FALSE(Untouched(p.out));
}

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
  EXPECT_TRUE(Rejects(create(kAbi + 1, 1, nullptr), "abi_version is 2"));
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

TEST(CApiAttend, MatchesTheCppApiForEveryDType) {
  for (DType dtype : kAllDTypes) {
    for (int tokens : {1, 3, 40}) {
      SCOPED_TRACE(testing::Message() << Name(dtype) << ", " << tokens << " tokens");
      Problem p(dtype, tokens);
      ExpectSameAttention(p);
    }
  }
}

TEST(CApiAttend, MatchesTheCppApiForEveryIsaAndThreadCount) {
  for (Isa isa : AttainableIsas()) {
    for (int threads : {1, 3}) {
      SCOPED_TRACE(testing::Message() << Name(isa) << ", " << threads << " threads");
      Problem p(DType::kBF16, 2, 3000);
      ExpectSameAttention(p, threads, std::string(Name(isa)).c_str());
    }
  }
}

TEST(CApiAttend, PassesEveryFieldOfTheSpec) {
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  const std::vector<std::function<void(Problem&)>> changes{
      [](Problem& p) { p.c_spec.scale = p.spec.scale = 0.7f; },
      [](Problem& p) { p.c_spec.softcap = p.spec.softcap = 1.5f; },
      [](Problem& p) { p.c_spec.window = p.spec.window = 9; },
      [](Problem& p) {
        p.c_spec.causal = 0;
        p.spec.causal = false;
      },
      [&](Problem& p) {
        p.c_spec.alibi_slopes = slopes.data();
        p.c_spec.alibi_slopes_count = slopes.size();
        p.spec.alibi_slopes = slopes;
      }};
  Problem usual;
  ExpectSameAttention(usual);
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    Problem p;
    changes[i](p);
    ExpectSameAttention(p);
    EXPECT_FALSE(SameBits(p.c_out, usual.c_out));  // the field matters
  }
}

TEST(CApiAttend, ReadsPages) {
  constexpr int kPageSlots = 32;
  Problem p;
  const ContextPtr context = MakeContext();
  for (DType dtype : kAllDTypes) {
    SCOPED_TRACE(Name(dtype));
    std::vector<std::vector<std::byte>> memory;
    std::vector<const void*> k_pages, v_pages;
    for (unsigned page = 0; page < 3; ++page) {
      memory.push_back(RandomRows(dtype, kPageSlots * p.kKvHeads, p.kDim, 10 + page));
      k_pages.push_back(memory.back().data());
      memory.push_back(RandomRows(dtype, kPageSlots * p.kKvHeads, p.kValueDim, 20 + page));
      v_pages.push_back(memory.back().data());
    }
    p.c_task.kv =
        treeline_kv_paged(k_pages.data(), v_pages.data(), 3, static_cast<treeline_dtype>(dtype),
                          p.slots, kPageSlots, p.kKvHeads, p.kDim, p.kValueDim);
    p.task.kv = KvView::Paged(k_pages, v_pages, dtype, p.slots, kPageSlots, p.kKvHeads, p.kDim,
                              p.kValueDim);
    ExpectSameAttention(p);
  }
}

TEST(CApiAttend, ReadsStrides) {
  // The same numbers with heads outermost.
  Problem p;
  const auto slots = static_cast<std::size_t>(p.slots);
  const std::size_t k_row = RowBytes(DType::kF32, p.kDim);
  const std::size_t q_row = k_row;
  std::vector<std::byte> k(p.k.size()), q(p.q.size() * sizeof(float));
  for (std::size_t head = 0; head < p.kKvHeads; ++head) {
    for (std::size_t slot = 0; slot < slots; ++slot) {
      std::memcpy(k.data() + (head * slots + slot) * k_row,
                  p.k.data() + (slot * p.kKvHeads + head) * k_row, k_row);
    }
  }
  const auto tokens = static_cast<std::size_t>(p.tokens);
  for (std::size_t head = 0; head < p.kHeads; ++head) {
    for (std::size_t token = 0; token < tokens; ++token) {
      std::memcpy(q.data() + (head * tokens + token) * q_row,
                  p.q.data() + (token * p.kHeads + head) * p.kDim, q_row);
    }
  }
  p.c_task.kv.k = {.base = k.data(),
                   .pages = nullptr,
                   .slot_stride = static_cast<std::int64_t>(k_row),
                   .head_stride = static_cast<std::int64_t>(slots * k_row)};
  p.c_task.q.data = q.data();
  p.c_task.q.token_stride = static_cast<std::int64_t>(q_row);
  p.c_task.q.head_stride = static_cast<std::int64_t>(tokens * q_row);
  ExpectSameAttention(p);
}

TEST(CApiAttend, TakesBothSegmentsOfPositions) {
  Problem p;
  const Positions::Segment head{.first = 1, .run = 2, .stride = 6, .count = 33};
  const Positions::Segment tail{.first = 200, .run = 1, .stride = 3, .count = p.slots - 33};
  p.c_task.kv_positions = {{{1, 2, 6, 33}, {200, 1, 3, p.slots - 33}}};
  p.task.kv_positions = Positions::Joined(head, tail);
  p.c_task.q_positions = {{{0, 0, 0, 0}, {250, 1, 1, p.tokens}}};  // an empty first one is ignored
  p.task.q_positions = Positions::Contiguous(250, p.tokens);
  ExpectSameAttention(p);
}

TEST(CApiAttend, TakesManyTasksOrNone) {
  Problem a(DType::kF16, 1, 90), b(DType::kQ8_0, 30, 50);
  const ContextPtr context = MakeContext(2);
  ThreadPool pool(2);
  const std::array<treeline_attend_task, 2> c_tasks{a.c_task, b.c_task};
  const std::array<AttendTask, 2> tasks{a.task, b.task};
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &a.c_spec, c_tasks.data(), 2)));
  Attend(a.spec, tasks, {.pool = &pool, .isa = {}});
  EXPECT_TRUE(SameBits(a.c_out, a.out));
  EXPECT_TRUE(SameBits(b.c_out, b.out));
  EXPECT_TRUE(Succeeds(treeline_attend(context.get(), &a.c_spec, nullptr, 0)));
}

TEST(CApiAttend, TakesEmptyTasks) {
  Problem no_queries(DType::kF32, 0, 5);
  no_queries.c_task.q.data = nullptr;
  no_queries.c_task.result = {nullptr, nullptr, 0, Problem::kValueDim};
  Problem no_keys(DType::kF32, 2, 2);
  no_keys.c_task.kv =
      treeline_kv_dense(nullptr, nullptr, TREELINE_F32, 0, Problem::kKvHeads, 16, 24);
  no_keys.c_task.kv_positions = {};
  const std::array<treeline_attend_task, 2> tasks{no_queries.c_task, no_keys.c_task};
  const ContextPtr context = MakeContext();
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &no_keys.c_spec, tasks.data(), 2)));
  EXPECT_TRUE(SameBits(no_keys.c_lse, std::vector<float>(no_keys.rows(), kNoKeys)));
  EXPECT_TRUE(SameBits(no_keys.c_out, std::vector<float>(no_keys.c_out.size(), 0.0f)));
}

// A valid call with one thing wrong, and what the error must say.
struct Mistake {
  const char* message;
  void (*make)(Problem&);
};

TEST(CApiAttend, RejectsBadSpecs) {
  static constexpr float kValues[] = {1.0f, 2.0f, 3.0f, kNan};
  const Mistake mistakes[] = {
      {"heads is 0", [](Problem& p) { p.c_spec.heads = 0; }},
      {"kv_heads is 3", [](Problem& p) { p.c_spec.kv_heads = 3; }},
      {"head_dim is 12", [](Problem& p) { p.c_spec.head_dim = 12; }},
      {"v_head_dim is 584", [](Problem& p) { p.c_spec.v_head_dim = 584; }},
      {"scale is nan", [](Problem& p) { p.c_spec.scale = kNan; }},
      {"softcap is -1", [](Problem& p) { p.c_spec.softcap = -1.0f; }},
      {"window is -1", [](Problem& p) { p.c_spec.window = -1; }},
      {"causal is 2", [](Problem& p) { p.c_spec.causal = 2; }},
      {"alibi_slopes is null", [](Problem& p) { p.c_spec.alibi_slopes_count = 4; }},
      {"alibi_slopes_count is 3",
       [](Problem& p) {
         p.c_spec.alibi_slopes = kValues;
         p.c_spec.alibi_slopes_count = 3;
       }},
      {"alibi_slopes[3] is nan",
       [](Problem& p) {
         p.c_spec.alibi_slopes = kValues;
         p.c_spec.alibi_slopes_count = 4;
       }},
      {"sinks is null", [](Problem& p) { p.c_spec.sinks_count = 4; }},
      {"sinks_count is 18446744073709551615",
       [](Problem& p) {
         p.c_spec.sinks = kValues;
         p.c_spec.sinks_count = std::numeric_limits<std::size_t>::max();
       }},
      {"sinks[3] is nan",
       [](Problem& p) {
         p.c_spec.sinks = kValues;
         p.c_spec.sinks_count = 4;
       }},
  };
  const ContextPtr context = MakeContext();
  for (const Mistake& mistake : mistakes) {
    Problem p;
    mistake.make(p);
    EXPECT_TRUE(Rejects(treeline_attend(context.get(), &p.c_spec, &p.c_task, 1), mistake.message));
    EXPECT_TRUE(Untouched(p.c_out) && Untouched(p.c_lse)) << mistake.message;
  }
}

TEST(CApiAttend, RejectsBadTasks) {
  static const void* const kNoPages[3] = {nullptr, nullptr, nullptr};
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  const auto paged = [](Problem& p) {
    p.c_task.kv = treeline_kv_paged(kNoPages, kNoPages, 3, TREELINE_F32, p.slots, 32, p.kKvHeads,
                                    p.kDim, p.kValueDim);
  };
  const std::vector<std::pair<const char*, std::function<void(Problem&)>>> mistakes{
      {"q is null", [](Problem& p) { p.c_task.q.data = nullptr; }},
      {"tasks[0].q.dtype is 9", [](Problem& p) { p.c_task.q.dtype = 9; }},
      {"q is q8_0", [](Problem& p) { p.c_task.q.dtype = TREELINE_Q8_0; }},
      {"q has 3 heads", [](Problem& p) { p.c_task.q.heads = 3; }},
      {"q has dim 8", [](Problem& p) { p.c_task.q.dim = 8; }},
      {"q has 2 tokens and 3 positions", [](Problem& p) { p.c_task.q.tokens = 2; }},
      {"q has -1 tokens", [](Problem& p) { p.c_task.q.tokens = -1; }},
      {"q's token stride is 0", [](Problem& p) { p.c_task.q.token_stride = 0; }},
      {"q's head stride is -64", [](Problem& p) { p.c_task.q.head_stride = -64; }},
      {"too large to address",
       [](Problem& p) { p.c_task.q.token_stride = kLargest - kLargest % 4; }},
      {"tasks[0].q_positions: first position is -1",
       [](Problem& p) { p.c_task.q_positions.segments[0].first = -1; }},
      {"tasks[0].kv_positions: run is 0",
       [](Problem& p) { p.c_task.kv_positions.segments[0].run = 0; }},
      {"tasks[0].kv_positions: stride is 1",
       [](Problem& p) { p.c_task.kv_positions.segments[0].stride = 1; }},
      {"tasks[0].kv_positions: count is -1",
       [](Problem& p) { p.c_task.kv_positions.segments[0].count = -1; }},
      {"tasks[0].kv_positions: position 3 follows",
       [](Problem& p) {
         p.c_task.kv_positions.segments[1] = {3, 1, 1, 1};
       }},
      {"kv has 70 slots and 71 positions",
       [](Problem& p) { p.c_task.kv_positions = treeline_positions_contiguous(0, 71); }},
      {"kv.k is null", [](Problem& p) { p.c_task.kv.k.base = nullptr; }},
      {"kv.v is null", [](Problem& p) { p.c_task.kv.v.base = nullptr; }},
      {"tasks[0].kv.dtype is -1", [](Problem& p) { p.c_task.kv.dtype = -1; }},
      {"kv has 1 heads", [](Problem& p) { p.c_task.kv.kv_heads = 1; }},
      {"kv has -1 slots",
       [](Problem& p) {
         p.c_task.kv.slots = -1;
         p.c_task.kv_positions = treeline_positions_contiguous(0, 0);
       }},
      {"kv.k's token stride is 1", [](Problem& p) { p.c_task.kv.k.slot_stride = 1; }},
      {"kv.v's head stride is 97", [](Problem& p) { p.c_task.kv.v.head_stride = 97; }},
      {"tasks[0].kv.page_slots is -1", [](Problem& p) { p.c_task.kv.page_slots = -1; }},
      {"tasks[0].kv.k.pages is set", [](Problem& p) { p.c_task.kv.k.pages = kNoPages; }},
      {"tasks[0].kv.k.base is set",
       [&](Problem& p) {
         paged(p);
         p.c_task.kv.k.base = p.k.data();
       }},
      {"tasks[0].kv.v.pages is null",
       [&](Problem& p) {
         paged(p);
         p.c_task.kv.v.pages = nullptr;
       }},
      {"tasks[0].kv.page_count is 2; 70 slots need 3 pages",
       [&](Problem& p) {
         paged(p);
         p.c_task.kv.page_count = 2;
       }},
      {"kv.k's page 0 is null", paged},
      {"tasks[0].result.out is null", [](Problem& p) { p.c_task.result.out = nullptr; }},
      {"tasks[0].result.lse is null", [](Problem& p) { p.c_task.result.lse = nullptr; }},
      {"tasks[0].result.rows is -1", [](Problem& p) { p.c_task.result.rows = -1; }},
      {"result.lse has 11 values", [](Problem& p) { p.c_task.result.rows = 11; }},
      {"too large to address", [](Problem& p) { p.c_task.result.rows = kLargest; }},
      {"too large to address", [](Problem& p) { p.c_task.result.rows = kLargest / 24; }},
      {"result has v_head_dim 16", [](Problem& p) { p.c_task.result.v_head_dim = 16; }},
      {"tasks[0].result.v_head_dim is -8", [](Problem& p) { p.c_task.result.v_head_dim = -8; }},
  };
  const ContextPtr context = MakeContext();
  for (const auto& [message, make] : mistakes) {
    Problem p;
    make(p);
    EXPECT_TRUE(Rejects(treeline_attend(context.get(), &p.c_spec, &p.c_task, 1), message));
    EXPECT_TRUE(Untouched(p.c_out) && Untouched(p.c_lse)) << message;
  }
}

TEST(CApiAttend, RejectsNull) {
  Problem p;
  const ContextPtr context = MakeContext();
  EXPECT_TRUE(Rejects(treeline_attend(nullptr, &p.c_spec, &p.c_task, 1), "context is null"));
  EXPECT_TRUE(Rejects(treeline_attend(context.get(), nullptr, &p.c_task, 1), "spec is null"));
  EXPECT_TRUE(Rejects(treeline_attend(context.get(), &p.c_spec, nullptr, 1), "tasks is null"));
}

TEST(CApiAttend, NamesTheTaskThatIsWrong) {
  Problem good, bad;
  bad.c_task.kv.dtype = 5;
  const std::array<treeline_attend_task, 2> tasks{good.c_task, bad.c_task};
  const ContextPtr context = MakeContext();
  EXPECT_TRUE(Rejects(treeline_attend(context.get(), &good.c_spec, tasks.data(), 2),
                      "tasks[1].kv.dtype is 5"));
  EXPECT_TRUE(Untouched(good.c_out));
}

// Partials of `rows` rows of 16, in one piece of memory each.
struct Parts {
  static constexpr int kDim = 16;

  Parts(std::size_t count, std::int64_t rows) {
    for (unsigned i = 0; i < count; ++i) {
      out.push_back(Random(static_cast<std::size_t>(rows) * kDim, 100 + i));
      lse.push_back(Random(static_cast<std::size_t>(rows), 900 + i));
    }
    for (std::size_t i = 0; i < count; ++i) {
      c.push_back({out[i].data(), lse[i].data(), rows, kDim});
      cpp.push_back({out[i], lse[i], kDim});
    }
  }

  std::vector<std::vector<float>> out, lse;
  std::vector<treeline_partial> c;
  std::vector<Partial> cpp;
};

TEST(CApiMerge, MatchesTheCppApi) {
  constexpr std::int64_t kRows = 7;
  const ContextPtr context = MakeContext(2);
  for (std::size_t count : {0u, 1u, 2u, 3u, 300u}) {
    SCOPED_TRACE(count);
    const Parts parts(count, kRows);
    Parts targets(2, kRows);
    ASSERT_TRUE(Succeeds(treeline_merge(context.get(), count == 0 ? nullptr : parts.c.data(), count,
                                        &targets.c[0])));
    Merge(parts.cpp, targets.cpp[1]);
    EXPECT_TRUE(SameBits(targets.out[0], targets.out[1]));
    EXPECT_TRUE(SameBits(targets.lse[0], targets.lse[1]));
  }
}

TEST(CApiMerge, MayWriteOverAPart) {
  Parts a(3, 5), b(3, 5);
  const ContextPtr context = MakeContext();
  ASSERT_TRUE(Succeeds(treeline_merge(context.get(), a.c.data(), 3, &a.c[1])));
  Merge(b.cpp, b.cpp[1]);
  EXPECT_TRUE(SameBits(a.out[1], b.out[1]));
  EXPECT_TRUE(SameBits(a.lse[1], b.lse[1]));
}

TEST(CApiMerge, TwoHalvesMakeTheWhole) {
  Problem whole;
  std::vector<float> outs[2]{whole.c_out, whole.c_out}, lses[2]{whole.c_lse, whole.c_lse};
  std::array<treeline_attend_task, 2> halves;
  for (int i = 0; i < 2; ++i) {
    const int first = i == 0 ? 0 : 31;
    const int count = i == 0 ? 31 : whole.slots - 31;
    const auto row = static_cast<std::size_t>(first) * Problem::kKvHeads;
    halves[i] = whole.CTask(outs[i], lses[i]);
    halves[i].kv = treeline_kv_dense(whole.k.data() + row * RowBytes(DType::kF32, Problem::kDim),
                                     whole.v.data() + row * RowBytes(DType::kF32, 24), TREELINE_F32,
                                     count, Problem::kKvHeads, Problem::kDim, 24);
    halves[i].kv_positions = treeline_positions_contiguous(first, count);
  }
  const ContextPtr context = MakeContext();
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &whole.c_spec, &whole.c_task, 1)));
  ASSERT_TRUE(Succeeds(treeline_attend(context.get(), &whole.c_spec, halves.data(), 2)));
  const treeline_partial parts[2] = {halves[0].result, halves[1].result};
  ASSERT_TRUE(Succeeds(treeline_merge(context.get(), parts, 2, &parts[0])));
  for (std::size_t i = 0; i < whole.c_out.size(); ++i) {
    EXPECT_NEAR(outs[0][i], whole.c_out[i], 1e-5);
  }
}

TEST(CApiMerge, RejectsBadArguments) {
  const ContextPtr context = MakeContext();
  Parts p(2, 5);
  treeline_partial target = p.c[0];
  const auto merge = [&](const treeline_partial& second, const treeline_partial& into) {
    const treeline_partial parts[2] = {p.c[0], second};
    return treeline_merge(context.get(), parts, 2, &into);
  };
  EXPECT_TRUE(Rejects(treeline_merge(nullptr, p.c.data(), 2, &target), "context is null"));
  EXPECT_TRUE(Rejects(treeline_merge(context.get(), nullptr, 2, &target), "parts is null"));
  EXPECT_TRUE(Rejects(treeline_merge(context.get(), p.c.data(), 2, nullptr), "target is null"));
  treeline_partial bad = p.c[1];
  bad.out = nullptr;
  EXPECT_TRUE(Rejects(merge(bad, target), "parts[1].out is null"));
  EXPECT_TRUE(Rejects(merge(p.c[1], bad), "target.out is null"));
  bad = p.c[1];
  bad.lse = nullptr;
  EXPECT_TRUE(Rejects(merge(bad, target), "parts[1].lse is null"));
  EXPECT_TRUE(Rejects(merge(p.c[1], bad), "target.lse is null"));
  bad = p.c[1];
  bad.rows = 4;
  EXPECT_TRUE(Rejects(merge(bad, target), "part 1 has 4 rows"));
  bad.rows = -4;
  EXPECT_TRUE(Rejects(merge(bad, target), "parts[1].rows is -4"));
  bad = p.c[1];
  bad.v_head_dim = 8;
  EXPECT_TRUE(Rejects(merge(bad, target), "rows of 8"));
  bad.v_head_dim = 7;
  EXPECT_TRUE(Rejects(merge(bad, target), "v_head_dim 7"));
  bad.v_head_dim = -8;
  EXPECT_TRUE(Rejects(merge(p.c[1], bad), "target.v_head_dim is -8"));
}

TEST(CApiSinks, MatchTheCppApi) {
  const std::vector<float> sinks{0.5f, -1.0f, 2.0f, 0.0f};
  Problem p;
  ExpectSameAttention(p);
  const std::vector<float> without = p.c_out;
  p.c_spec.sinks = sinks.data();
  p.c_spec.sinks_count = sinks.size();
  p.spec.sinks = sinks;
  ASSERT_TRUE(Succeeds(treeline_apply_sinks(&p.c_spec, &p.c_task.result)));
  ApplySinks(p.spec, p.task.result);
  EXPECT_TRUE(SameBits(p.c_out, p.out));
  EXPECT_TRUE(SameBits(p.c_lse, p.lse));
  EXPECT_FALSE(SameBits(p.c_out, without));
}

TEST(CApiSinks, RejectBadArguments) {
  const std::vector<float> sinks(4, 1.0f);
  Problem p;
  EXPECT_TRUE(Rejects(treeline_apply_sinks(nullptr, &p.c_task.result), "spec is null"));
  EXPECT_TRUE(Rejects(treeline_apply_sinks(&p.c_spec, nullptr), "partial is null"));
  p.c_spec.sinks = sinks.data();
  p.c_spec.sinks_count = 4;
  treeline_partial bad = p.c_task.result;
  bad.rows = 3;
  EXPECT_TRUE(Rejects(treeline_apply_sinks(&p.c_spec, &bad), "3 rows"));
  bad = p.c_task.result;
  bad.lse = nullptr;
  EXPECT_TRUE(Rejects(treeline_apply_sinks(&p.c_spec, &bad), "partial.lse is null"));
  EXPECT_TRUE(Untouched(p.c_out) && Untouched(p.c_lse));
}

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

TEST(CApiErrors, LastErrorBelongsToTheThreadAndOutlivesSuccess) {
  std::size_t bytes = 0;
  ASSERT_TRUE(Rejects(treeline_row_bytes(99, 8, &bytes), "dtype is 99"));
  ASSERT_TRUE(Succeeds(treeline_row_bytes(TREELINE_F32, 8, &bytes)));
  std::thread([] {
    EXPECT_STREQ(treeline_last_error(), "");
    std::size_t other = 0;
    EXPECT_TRUE(Rejects(treeline_row_bytes(98, 8, &other), "dtype is 98"));
  }).join();
  EXPECT_EQ(std::string(treeline_last_error()).find("dtype is 99"), 0u);
}

TEST(CApiErrors, LongMessagesAreCut) {
  const std::string name(100000, 'x');
  treeline_context* context = nullptr;
  EXPECT_TRUE(
      Rejects(treeline_context_create(TREELINE_ABI_VERSION, 1, name.c_str(), &context), "xxx"));
  EXPECT_EQ(std::strlen(treeline_last_error()), 1023u);
}

template <class E>
treeline_status StatusOf(const E& error) {
  return c_api::Guard([&] { throw error; });
}

TEST(CApiErrors, EveryExceptionBecomesAStatus) {
  EXPECT_EQ(c_api::Guard([] {}), TREELINE_OK);
  EXPECT_EQ(StatusOf(ArgumentError("an argument")), TREELINE_ERROR_ARGUMENT);
  EXPECT_STREQ(treeline_last_error(), "an argument");
  EXPECT_EQ(StatusOf(CommError("a peer")), TREELINE_ERROR_COMM);
  EXPECT_STREQ(treeline_last_error(), "a peer");
  EXPECT_EQ(StatusOf(FormatError("a file")), TREELINE_ERROR_FORMAT);
  EXPECT_STREQ(treeline_last_error(), "a file");
  EXPECT_EQ(StatusOf(DeviceError("a device")), TREELINE_ERROR_DEVICE);
  EXPECT_STREQ(treeline_last_error(), "a device");
  const auto no_thread = std::make_error_code(std::errc::resource_unavailable_try_again);
  EXPECT_EQ(StatusOf(std::system_error(no_thread)), TREELINE_ERROR_DEVICE);
  EXPECT_EQ(StatusOf(std::bad_alloc()), TREELINE_ERROR_MEMORY);
  EXPECT_STREQ(treeline_last_error(), "out of memory");
  EXPECT_EQ(StatusOf(std::length_error("too long")), TREELINE_ERROR_MEMORY);
  EXPECT_EQ(StatusOf(std::logic_error("a fault")), TREELINE_ERROR_INTERNAL);
  EXPECT_STREQ(treeline_last_error(), "a fault");
  EXPECT_EQ(StatusOf(Error("of no kind")), TREELINE_ERROR_INTERNAL);
  EXPECT_EQ(StatusOf(42), TREELINE_ERROR_INTERNAL);
  EXPECT_STREQ(treeline_last_error(), "unknown exception");
}

}  // namespace
}  // namespace treeline
