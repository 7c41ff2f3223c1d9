#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "c_api/c_api_problem.h"
#include "treeline/thread_pool.h"

namespace treeline::test {
namespace {

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

// Not every CPU has another way to compute then: both APIs must choose the same.
TEST(CApiAttend, PassesWhatMayBeRounded) {
  Problem decoding(DType::kQ8_0);
  decoding.spec.int8_queries = true;
  decoding.c_spec.int8_queries = 1;
  ExpectSameAttention(decoding);
  Problem forward(DType::kF32, /*query_tokens=*/20);
  forward.spec.bf16_terms = 2;
  forward.c_spec.bf16_terms = 2;
  ExpectSameAttention(forward);
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
      {"bf16_terms is 3", [](Problem& p) { p.c_spec.bf16_terms = 3; }},
      {"int8_queries is 2", [](Problem& p) { p.c_spec.int8_queries = 2; }},
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

}  // namespace
}  // namespace treeline::test
