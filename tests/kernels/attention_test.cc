// Every kernel on every attainable instruction set against the float64 oracle.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "cli/check.h"
#include "isa_name.h"
#include "kernels/cpu/kernel_table.h"
#include "sanitized.h"
#include "treeline/memory.h"
#include "treeline/reference.h"
#include "treeline/thread_pool.h"

namespace treeline {
namespace {

using cli::Errors;
using cli::Kernel;
using cli::Problem;
using cli::ProblemShape;
using cli::Storage;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class AttentionTest : public testing::TestWithParam<Isa> {
 protected:
  Context context(ThreadPool* pool = nullptr, MemoryTracker* memory = nullptr) const {
    return {.pool = pool, .memory = memory, .isa = GetParam()};
  }

  // Expects every kernel that the shape uses to be within its bound.
  void ExpectExact(const ProblemShape& shape, LayoutKind layout = LayoutKind::kStriped,
                   int ranks = 3, ThreadPool* pool = nullptr) const {
    cli::Checker checker(shape, layout, ranks);
    const Errors errors = checker.Run(context(pool));
    for (std::size_t k = 0; k < cli::kKernels; ++k) {
      const auto kernel = static_cast<Kernel>(k);
      const auto arithmetic =
          cli::ArithmeticOf(kernel, GetParam(), shape.spec, shape.q_dtype, shape.kv_dtype);
      EXPECT_LE(errors[k], cli::Bound(kernel, arithmetic))
          << Name(kernel) << ", " << Name(layout) << " over " << ranks << ": " << shape.Describe();
    }
  }

  void ExpectBoundedMemory(const ProblemShape& shape) const;
  // With `bad` in a key, or in a value, at slot `bad_slot`.
  void ExpectReach(DType dtype, int bf16_terms, std::int64_t queries, std::int64_t keys,
                   std::int64_t bad_slot, float bad, bool in_key) const;
};

INSTANTIATE_TEST_SUITE_P(Isas, AttentionTest, testing::ValuesIn(cpu::TestedIsas()), IsaName);

// Queries at the end of `keys` keys.
ProblemShape Sequence(const AttentionSpec& spec, std::int64_t queries, std::int64_t keys) {
  ProblemShape shape;
  shape.spec = spec;
  shape.seed = static_cast<std::uint64_t>(queries * 1000 + keys);
  shape.sequences = {{Positions::Contiguous(std::max<std::int64_t>(keys - queries, 0), queries),
                      Positions::Contiguous(0, keys)}};
  return shape;
}

ProblemShape InBf16(ProblemShape shape) {
  shape.q_dtype = shape.kv_dtype = DType::kBF16;
  return shape;
}

AttentionSpec Causal(int heads, int kv_heads, int head_dim) {
  AttentionSpec spec = AttentionSpec::Make(heads, kv_heads, head_dim);
  spec.causal = true;
  return spec;
}

TEST_P(AttentionTest, RandomShapesAndOptions) {
  ThreadPool pool(3);
  for (std::uint64_t i = 0; i < (kSanitized ? 40 : 120); ++i) {
    const cli::RandomCase random = cli::MakeRandomCase(2024, i);
    ExpectExact(random.shape, random.layout, random.ranks, i % 2 == 0 ? &pool : nullptr);
  }
}

TEST_P(AttentionTest, OddLengths) {
  for (std::int64_t keys : {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257}) {
    for (std::int64_t queries : {0, 1, 2, 5, 17, 65}) {
      ExpectExact(Sequence(Causal(4, 2, 16), queries, keys), LayoutKind::kZigzag, 4);
    }
  }
}

TEST_P(AttentionTest, EveryHeadDim) {
  for (int dim = 8; dim <= AttentionSpec::kMaxHeadDim; dim += dim < 136 && !kSanitized ? 8 : 56) {
    for (DType dtype : kAllDTypes) {
      for (std::int64_t queries : {1, 20}) {
        ProblemShape shape = Sequence(Causal(3, 1, dim), queries, 37);
        shape.kv_dtype = dtype;
        shape.storage = Storage::kPadded;
        ExpectExact(shape);
      }
    }
  }
}

TEST_P(AttentionTest, LatentAttention) {
  AttentionSpec spec = Causal(16, 1, 576);
  spec.v_head_dim = 512;
  for (std::int64_t queries : {1, 4}) {
    ProblemShape shape = Sequence(spec, queries, 300);
    shape.kv_dtype = DType::kBF16;
    ExpectExact(shape);
  }
}

// Long enough for the interleaved order of decoding and for splits over threads.
TEST_P(AttentionTest, LongDecode) {
  ThreadPool pool(3);
  for (DType dtype : kAllDTypes) {
    for (Storage storage : {Storage::kDense, Storage::kPaged}) {
      for (std::int64_t queries : {1, 3}) {
        ProblemShape shape = Sequence(Causal(8, 2, 64), queries, kSanitized ? 2003 : 5003);
        shape.kv_dtype = dtype;
        shape.storage = storage;
        shape.page_slots = 48;
        ExpectExact(shape, LayoutKind::kContiguous, 5, &pool);
      }
    }
  }
}

TEST_P(AttentionTest, PackedBatch) {
  ProblemShape shape;
  shape.spec = Causal(9, 3, 64);
  shape.spec.window = 33;
  for (std::int64_t keys : {0, 1, 5, 64, 100, 0, 33, 250}) {
    for (std::int64_t queries : {1, 0, 30}) {
      shape.sequences.push_back(
          {Positions::Contiguous(std::max<std::int64_t>(keys - queries, 0), queries),
           Positions::Contiguous(0, keys)});
    }
  }
  ThreadPool pool(2);
  ExpectExact(shape, LayoutKind::kStriped, 4, &pool);
}

// One rank's rows and keys of every layout: positions decide, not slots.
TEST_P(AttentionTest, ShardsOfEveryLayout) {
  AttentionSpec spec = Causal(4, 2, 24);
  spec.window = 50;
  spec.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  constexpr std::int64_t kTokens = 131;
  constexpr int kWeights[] = {3, 0, 1, 2};
  for (const Layout& layout :
       {Layout::Contiguous(kTokens, 4), Layout::Striped(kTokens, 4), Layout::Striped(kTokens, 4, 7),
        Layout::Zigzag(kTokens, 4), Layout::Weighted(kTokens, kWeights, 2)}) {
    for (int q_rank = 0; q_rank < layout.ranks(); ++q_rank) {
      ProblemShape shape = Sequence(spec, 0, 0);
      for (int kv_rank = 0; kv_rank < layout.ranks(); ++kv_rank) {
        shape.sequences.push_back({layout.Shard(q_rank), layout.Shard(kv_rank)});
      }
      ExpectExact(shape);
    }
  }
}

TEST_P(AttentionTest, HugeAndTinyScores) {
  for (float magnitude : {1e-30f, 1e-4f, 100.0f, 3000.0f}) {
    for (std::int64_t queries : {1, 40}) {
      ProblemShape shape = Sequence(Causal(2, 1, 32), queries, 80);
      shape.magnitude = magnitude;
      ExpectExact(shape);
    }
  }
}

TEST_P(AttentionTest, RowsWithoutKeysAreEmpty) {
  for (std::int64_t queries : {2, 60}) {
    ProblemShape shape = Sequence(Causal(2, 2, 16), 0, 0);
    // All keys lie after all queries.
    shape.sequences = {{Positions::Contiguous(0, queries), Positions::Contiguous(queries, 70)}};
    Problem problem(shape);
    Attend(problem.spec(), problem.tasks(), context());
    for (float x : problem.tasks()[0].result.out) EXPECT_EQ(x, 0.0f);
    for (float x : problem.tasks()[0].result.lse) EXPECT_EQ(x, kNoKeys);
  }
}

// Whatever computes in bf16, in blocks and tiles of its own: their edges, and every option. What
// does not has other tests for those.
TEST_P(AttentionTest, QueriesAndKeysInBf16) {
  const bool edges = ComputesInBf16(GetParam());
  ThreadPool pool(2);
  const auto check = [&](const AttentionSpec& spec, std::int64_t queries, std::int64_t keys,
                         Storage storage) {
    ProblemShape shape = InBf16(Sequence(spec, queries, keys));
    shape.storage = storage;
    shape.page_slots = 24;
    ExpectExact(shape, LayoutKind::kStriped, 3, &pool);
  };
  if (edges) {
    for (std::int64_t keys : {1, 31, 32, 33, 255, 256, 257, 300}) {
      check(Causal(1, 1, 16), keys, keys, Storage::kDense);
    }
    for (std::int64_t queries : {17, 127, 128, 129, 384, 385}) {
      check(Causal(2, 1, 16), queries, 33, Storage::kPadded);
    }
    for (int dim : {8, 24, 40, 64, 72, 256, 576}) {
      AttentionSpec spec = Causal(2, 1, dim);
      check(spec, 40, 50, Storage::kPaged);
      spec.v_head_dim = 48;
      check(spec, 70, 20, Storage::kPadded);
    }
    check(Causal(64, 64, 8), 40, 400, Storage::kPaged);  // so many keys have larger blocks
    // Where a row has one key, the gradients of its score cancel.
    AttentionSpec spec = AttentionSpec::Make(8, 1, 64);
    spec.v_head_dim = 256;
    check(spec, 64, 1, Storage::kDense);
  }
  const std::int64_t queries = edges && !kSanitized ? 150 : 40;
  const std::int64_t keys = 2 * queries;
  AttentionSpec spec = Causal(4, 2, 40);
  spec.window = 37;
  check(spec, queries, keys, Storage::kPaged);
  spec.softcap = 3.0f;
  check(spec, queries, keys, Storage::kDense);
  spec.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  spec.sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  check(spec, queries, keys, Storage::kPaged);
  spec.scale = -spec.scale;  // the largest product is the smallest score
  spec.softcap = 0.0f;
  check(spec, queries, keys, Storage::kDense);
}

void WriteElement(DType dtype, std::byte* row, int i, float x) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(row)[i] = x;
  } else {
    reinterpret_cast<std::uint16_t*>(row)[i] =
        dtype == DType::kF16 ? F16FromF32(x) : BF16FromF32(x);
  }
}

void AttentionTest::ExpectReach(DType dtype, int bf16_terms, std::int64_t queries,
                                std::int64_t keys, std::int64_t bad_slot, float bad,
                                bool in_key) const {
  SCOPED_TRACE(testing::Message() << Name(dtype) << ", " << bf16_terms << " terms, " << queries
                                  << " queries, " << bad << (in_key ? " in a key" : " in a value"));
  AttentionSpec spec = Causal(2, 1, 16);
  spec.window = 40;
  spec.bf16_terms = bf16_terms;
  ProblemShape shape = Sequence(spec, 0, 0);
  shape.q_dtype = shape.kv_dtype = dtype;
  // Some rows before the bad key, some with it in their window, some beyond.
  shape.sequences = {
      {Positions::Contiguous(bad_slot - queries / 3, queries), Positions::Contiguous(0, keys)}};
  Problem problem(shape);
  const AttendTask& task = problem.tasks()[0];
  const std::byte* row = in_key ? task.kv.KeyRow(bad_slot, 0) : task.kv.ValueRow(bad_slot, 0);
  WriteElement(dtype, const_cast<std::byte*>(row), 5, bad);
  Attend(spec, problem.tasks(), context());
  const reference::Result expected = reference::Attend(spec, task);
  const Kernel kernel = cli::KernelOf(spec, task);
  const double bound =
      cli::Bound(kernel, cli::ArithmeticOf(kernel, GetParam(), spec, dtype, dtype));
  const std::vector<BackwardTask>& backward = problem.MakeBackward();
  AttendBackward(spec, backward, context());
  for (std::int64_t t = 0; t < queries; ++t) {
    const SlotRange seen = Visible(spec, task.q_positions[t], task.kv_positions);
    const bool sees = seen.begin <= bad_slot && bad_slot < seen.end;
    for (int h = 0; h < spec.heads; ++h) {
      const auto r = static_cast<std::size_t>(t * spec.heads + h);
      const auto out = task.result.out.subspan(r * 16, 16);
      if (!sees) {
        for (std::size_t d = 0; d < 16; ++d) {
          ASSERT_NEAR(out[d], expected.out[r * 16 + d], 4 * bound)
              << "row " << t << " does not see the key";
        }
        EXPECT_LT(task.result.lse[r], kInf);  // no NaN; -inf where it sees no key at all
        const float* dq = backward[0].dq.Row(t, h);
        EXPECT_TRUE(std::all_of(dq, dq + 16, [](float x) { return std::isfinite(x); }));
      } else if (!std::isfinite(expected.out[r * 16 + 5])) {
        EXPECT_FALSE(std::isfinite(out[5])) << "row " << t << " sees the key";
      }
    }
  }
  // A key that no row shares with the bad one keeps a finite gradient.
  const float* dk = backward[0].dk.Row(bad_slot - spec.window - 1, 0);
  EXPECT_TRUE(std::all_of(dk, dk + 16, [](float x) { return std::isfinite(x); }));
}

// A key or value that is not finite reaches exactly the rows that see it.
TEST_P(AttentionTest, NonFiniteValuesReachOnlyRowsThatSeeThem) {
  constexpr std::int64_t kKeys = 150;
  constexpr std::int64_t kBad = 101;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (std::int64_t queries : {3, 60, 150}) {
      for (float bad : {kNaN, kInf, -kInf}) {
        for (bool in_key : {false, true}) {
          ExpectReach(dtype, 0, queries, kKeys, kBad, bad, in_key);
          if (!ComputesInBf16(GetParam()) || dtype == DType::kBF16) continue;
          for (int terms : {1, 2}) ExpectReach(dtype, terms, queries, kKeys, kBad, bad, in_key);
        }
      }
    }
  }
}

// A query that is not finite spoils its own rows; so does an output that is none, in gradients,
// whatever the bits of its NaN.
TEST_P(AttentionTest, NonFiniteRowsSpoilThemselvesAlone) {
  constexpr std::int64_t kTokens = 100;
  constexpr std::int64_t kBad = 70;
  const auto finite = [](const float* row) {
    return std::all_of(row, row + 16, [](float x) { return std::isfinite(x); });
  };
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int terms : {0, 1, 2}) {
      ProblemShape shape = Sequence(Causal(2, 1, 16), kTokens, kTokens);
      shape.spec.bf16_terms = terms;
      shape.q_dtype = shape.kv_dtype = dtype;
      Problem problem(shape);
      const AttendTask& task = problem.tasks()[0];
      Attend(shape.spec, problem.tasks(), context());
      const std::vector<BackwardTask>& backward = problem.MakeBackward();
      for (const std::uint32_t bits : {0xFFFFFFFFU, 0x7FFFFFFFU, 0x7FC00000U, 0x7F800000U}) {
        SCOPED_TRACE(testing::Message()
                     << Name(dtype) << ", " << terms << " terms, " << std::hex << bits);
        float& bad = task.result.out[(2 * kBad + 1) * 16 + 3];
        const float good = std::exchange(bad, std::bit_cast<float>(bits));
        AttendBackward(shape.spec, backward, context());
        bad = good;
        for (std::int64_t t = 0; t < kTokens; ++t) {
          EXPECT_TRUE(finite(backward[0].dq.Row(t, 0))) << t;
          EXPECT_EQ(finite(backward[0].dq.Row(t, 1)), t != kBad) << t;
          // Keys that the row sees.
          EXPECT_EQ(finite(backward[0].dk.Row(t, 0)), t > kBad) << t;
        }
      }
      WriteElement(dtype, const_cast<std::byte*>(task.q.Row(kBad, 1)), 3, kNaN);
      Attend(shape.spec, problem.tasks(), context());
      for (std::int64_t t = 0; t < kTokens; ++t) {
        EXPECT_TRUE(finite(&task.result.out[static_cast<std::size_t>(2 * t) * 16])) << t;
        EXPECT_EQ(finite(&task.result.out[static_cast<std::size_t>(2 * t + 1) * 16]), t != kBad);
      }
    }
  }
}

// Rounded queries, and keys and values of bytes: a scale, or a query, that is not finite.
TEST_P(AttentionTest, NonFiniteNumbersStayInTheirRowsWithInt8Queries) {
  constexpr std::int64_t kKeys = 75;
  constexpr std::uint16_t kNanBits = 0x7E00;  // of f16
  constexpr std::uint16_t kInfinityBits = 0x7C00;
  AttentionSpec spec = AttentionSpec::Make(3, 1, 40);
  spec.int8_queries = true;
  ProblemShape shape = Sequence(spec, 1, kKeys);
  shape.kv_dtype = DType::kQ8_0;
  const auto finite = [&](const Problem& problem, int head, int begin, int end) {
    const float* row = &problem.tasks()[0].result.out[static_cast<std::size_t>(head) * 40];
    return std::all_of(row + begin, row + end, [](float x) { return std::isfinite(x); });
  };
  {
    Problem problem(shape);
    const AttendTask& task = problem.tasks()[0];
    WriteElement(shape.q_dtype, const_cast<std::byte*>(task.q.Row(0, 1)), 35, kNaN);
    Attend(spec, problem.tasks(), context());
    EXPECT_TRUE(finite(problem, 0, 0, 40));
    EXPECT_FALSE(finite(problem, 1, 0, 1));
    EXPECT_TRUE(finite(problem, 2, 0, 40));
  }
  for (const std::int64_t slot : {std::int64_t{0}, kKeys - 1}) {
    for (const std::uint16_t bits : {kNanBits, kInfinityBits}) {
      Problem problem(shape);
      auto* blocks = reinterpret_cast<Q8Block*>(
          const_cast<std::byte*>(problem.tasks()[0].kv.ValueRow(slot, 0)));
      blocks[1].scale = bits;
      Attend(spec, problem.tasks(), context());
      for (int head = 0; head < 3; ++head) {
        EXPECT_TRUE(finite(problem, head, 0, 32));
        EXPECT_FALSE(finite(problem, head, 32, 33));
      }
      blocks =
          reinterpret_cast<Q8Block*>(const_cast<std::byte*>(problem.tasks()[0].kv.KeyRow(slot, 0)));
      blocks[0].scale = bits;
      Attend(spec, problem.tasks(), context());
      for (int head = 0; head < 3; ++head) EXPECT_FALSE(finite(problem, head, 0, 1));
    }
  }
}

// Blocks lie in a page, or reach into the next, or have pages of their own for each key: none is
// left out or taken twice. Which keys share a block decides only how weights of 14 bits round.
TEST_P(AttentionTest, PagesOfAnySizeWithInt8Queries) {
  constexpr float kSumTolerance = 1e-5f;
  constexpr float kRounding = 1e-4f;
  ThreadPool pool(3);
  for (const std::int64_t window : {std::int64_t{0}, std::int64_t{777}}) {
    AttentionSpec spec = AttentionSpec::Make(6, 2, 64);
    spec.int8_queries = true;
    spec.causal = true;
    spec.window = window;
    ProblemShape shape = Sequence(spec, 2, 1501);
    shape.kv_dtype = DType::kQ8_0;
    Problem dense(shape);
    Attend(spec, dense.tasks(), context());
    const auto& expected = dense.tasks()[0].result;
    shape.storage = Storage::kPaged;
    for (const std::int64_t slots : {1, 7, 15, 16, 17, 24, 48, 250, 256, 2000}) {
      SCOPED_TRACE(testing::Message() << "pages of " << slots << ", window " << window);
      shape.page_slots = slots;
      Problem paged(shape);
      Attend(spec, paged.tasks(), context(&pool));
      const auto& result = paged.tasks()[0].result;
      for (std::size_t i = 0; i < expected.lse.size(); ++i) {
        EXPECT_NEAR(result.lse[i], expected.lse[i], kSumTolerance) << i;
      }
      for (std::size_t i = 0; i < expected.out.size(); ++i) {
        EXPECT_NEAR(result.out[i], expected.out[i], kRounding) << i;
      }
    }
  }
}

// Threads change who computes what, not what is computed: gradients come out bit for bit.
TEST_P(AttentionTest, GradientsDoNotDependOnThreads) {
  // One key head, whose blocks follow each other; heads that take turns; more heads than threads.
  for (const ProblemShape& in_f32 :
       {Sequence(Causal(4, 1, 32), 300, 400), Sequence(Causal(6, 3, 32), 300, 900),
        Sequence(Causal(16, 16, 8), 200, 400)}) {
    for (ProblemShape shape : {in_f32, InBf16(in_f32)}) {
      if (shape.kv_dtype == DType::kBF16 && !ComputesInBf16(GetParam())) continue;
      shape.sequences.push_back(
          {Positions::Contiguous(10, 100), Positions::Contiguous(0, 110)});  // a task of its own
      Problem problem(shape);
      Attend(problem.spec(), problem.tasks(), context());
      std::vector<std::vector<float>> runs;
      for (int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads, std::chrono::microseconds(0));
        const std::vector<BackwardTask>& tasks = problem.MakeBackward();
        AttendBackward(problem.spec(), tasks, context(&pool));
        std::vector<float>& all = runs.emplace_back();
        for (const BackwardTask& task : tasks) {
          for (const GradView* view : {&task.dq, &task.dk, &task.dv}) {
            all.insert(all.end(), view->data, view->data + view->tokens * view->heads * view->dim);
          }
        }
      }
      for (const std::vector<float>& run : runs) {
        EXPECT_EQ(std::memcmp(run.data(), runs[0].data(), run.size() * sizeof(float)), 0);
      }
    }
  }
}

void AttentionTest::ExpectBoundedMemory(const ProblemShape& shape) const {
  constexpr std::size_t kPerThread = std::size_t{2} << 20;
  const AttentionSpec& spec = shape.spec;
  Problem problem(shape);
  for (int threads : {1, 3}) {
    ThreadPool pool(threads, std::chrono::microseconds(0));
    MemoryTracker memory;
    Attend(spec, problem.tasks(), context(&pool, &memory));
    EXPECT_GT(memory.peak(Purpose::kWorkspace), 0u);
    EXPECT_LE(memory.peak(Purpose::kWorkspace), kPerThread * static_cast<std::size_t>(threads))
        << "attend, " << threads << " threads, " << shape.Describe();
    EXPECT_EQ(memory.held(Purpose::kWorkspace), 0u);
    if (spec.head_dim > AttentionSpec::kMaxBackwardHeadDim || problem.tasks()[0].q.tokens < 100) {
      continue;
    }
    memory.ResetPeaks();
    AttendBackward(spec, problem.MakeBackward(), context(&pool, &memory));
    EXPECT_LE(memory.peak(Purpose::kWorkspace), kPerThread * static_cast<std::size_t>(threads))
        << "backward, " << threads << " threads, " << shape.Describe();
  }
}

TEST_P(AttentionTest, WorkingMemoryIsBounded) {
  struct Case {
    int heads, kv_heads, head_dim, v_head_dim;
    std::int64_t queries, keys;
  };
  // Small, because working memory depends on heads, dims and rows, not on the amount of work.
  for (const Case& c : {Case{2, 2, 128, 128, 200, 200}, Case{1, 1, 576, 512, 200, 20},
                        Case{128, 1, 576, 512, 1, 40}, Case{32, 8, 128, 128, 1, 6000},
                        Case{32, 8, 128, 128, 4, 600}, Case{2048, 2048, 128, 128, 1, 2},
                        Case{1, 1, 256, 256, 200, 100}, Case{64, 64, 128, 128, 100, 400}}) {
    AttentionSpec spec = Causal(c.heads, c.kv_heads, c.head_dim);
    spec.v_head_dim = c.v_head_dim;
    ProblemShape shape = Sequence(spec, c.queries, c.keys);
    shape.kv_dtype = DType::kBF16;
    ExpectBoundedMemory(shape);
    if (!ComputesInBf16(GetParam())) continue;
    ExpectBoundedMemory(InBf16(shape));
    shape.spec.bf16_terms = 2;
    ExpectBoundedMemory(shape);
  }
}

}  // namespace
}  // namespace treeline
