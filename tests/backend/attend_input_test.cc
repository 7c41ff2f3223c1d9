#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "backend/broken_tasks.h"
#include "treeline/thread_pool.h"

namespace treeline::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(AttendInputTest, TheUnbrokenTasksAreValid) {
  Forward forward;
  EXPECT_NO_THROW(Attend(forward.spec, {&forward.task, 1}));
  EXPECT_THAT(forward.out, Each(::testing::FloatEq(2.0f)));
  Forward paged;
  paged.UsePages();
  EXPECT_NO_THROW(Attend(paged.spec, {&paged.task, 1}));
  EXPECT_EQ(paged.out, forward.out);
  EXPECT_EQ(paged.lse, forward.lse);
  Backward backward;
  EXPECT_NO_THROW(AttendBackward(backward.spec, {&backward.gradients, 1}));
  EXPECT_FALSE(backward.Untouched());
}

TEST(AttendInputTest, TheTaskIsNamed) {
  Forward good, bad;
  bad.task.q.data = nullptr;
  const std::vector<AttendTask> tasks{good.task, good.task, bad.task};
  EXPECT_THAT([&] { Attend(bad.spec, tasks); },
              ThrowsMessage<ArgumentError>(HasSubstr("task 2: q is null")));
}

TEST(AttendInputTest, BadSpecIsNamed) {
  ExpectErrors({BrokenForward{[](Forward& f) { f.spec.window = -3; }, "window", "-3"},
                {[](Forward& f) { f.spec.sinks.assign(3, 0.0f); }, "sinks", "3 values"},
                {[](Forward& f) { f.spec.head_dim = 12; }, "head_dim", "12"}});
}

TEST(AttendInputTest, BadQueriesAreNamed) {
  ExpectErrors({
      BrokenForward{[](Forward& f) { f.task.q.data = nullptr; }, "q", "null"},
      {[](Forward& f) { f.task.q.heads = 3; }, "q has 3 heads", "4"},
      {[](Forward& f) { f.task.q.heads = -4; }, "q has -4 heads", "4"},
      {[](Forward& f) { f.task.q.dim = 8; }, "q has dim 8", "16"},
      {[](Forward& f) { f.task.q.tokens = 2; }, "2 tokens", "3 positions"},
      {[](Forward& f) { f.task.q.tokens = -1; }, "q has -1 tokens", "0 to"},
      {[](Forward& f) { f.task.q.tokens = kInt64Max; }, "q has", std::to_string(kInt64Max)},
      {[](Forward& f) { f.task.q_positions = Positions::Contiguous(0, 4); }, "q", "4 positions"},
      {[](Forward& f) { f.task.q.dtype = DType::kQ8_0; }, "q is q8_0", "f32, bf16 or f16"},
      {[](Forward& f) { f.task.q.dtype = static_cast<DType>(9); }, "dtype", "9"},
  });
}

TEST(AttendInputTest, MisalignedPointersAreNamed) {
  for (int shift : {1, 2, 3}) {
    Forward f;
    f.task.q.data = Shifted(f.task.q.data, shift);
    EXPECT_THAT(
        [&] {
          Attend(f.spec, {&f.task, 1});
        },
        ThrowsMessage<ArgumentError>(
            AllOf(HasSubstr("q is at " + Address(f.task.q.data)), HasSubstr("4 bytes"))));
    EXPECT_TRUE(f.Untouched());
  }
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    Forward f;
    f.task.q = TensorView::Dense(Shifted(f.task.q.data, 1), dtype, kTokens, 4, 16);
    EXPECT_THAT(
        [&] {
          Attend(f.spec, {&f.task, 1});
        },
        ThrowsMessage<ArgumentError>(
            AllOf(HasSubstr("q is at " + Address(f.task.q.data)), HasSubstr("2 bytes"))));
    f.task.q.data = Shifted(f.task.q.data, 1);  // two in all are enough
    EXPECT_NO_THROW(Attend(f.spec, {&f.task, 1}));
  }
  for (DType dtype : {DType::kF32, DType::kQ8_0}) {
    Forward f;
    const int shift = dtype == DType::kF32 ? 2 : 1;
    f.task.kv.dtype = dtype;
    f.task.kv.v.base = Shifted(f.task.kv.v.base, shift);
    EXPECT_THAT(
        [&] {
          Attend(f.spec, {&f.task, 1});
        },
        ThrowsMessage<ArgumentError>(HasSubstr("v is at " + Address(f.task.kv.v.base))));
    f.task.kv.k.base = Shifted(f.task.kv.k.base, shift);
    EXPECT_THAT(
        [&] {
          Attend(f.spec, {&f.task, 1});
        },
        ThrowsMessage<ArgumentError>(HasSubstr("k is at " + Address(f.task.kv.k.base))));
    EXPECT_TRUE(f.Untouched());
  }
}

TEST(AttendInputTest, OverlappingQueryStridesAreNamed) {
  // Token strides (of 3), then head strides (of 4), then each alone legal but not together.
  const auto token = [](std::int64_t stride) {
    return [stride](Forward& f) { f.task.q.token_stride = stride; };
  };
  const auto head = [](std::int64_t stride) {
    return [stride](Forward& f) { f.task.q.head_stride = stride; };
  };
  for (std::int64_t stride :
       {kQRow - 4, std::int64_t{4}, std::int64_t{0}, -kQRow, -4 * kQRow, kInt64Min}) {
    ExpectErrors(
        {BrokenForward{token(stride), "q's token stride is " + std::to_string(stride), "64"},
         {head(stride), "q's head stride is " + std::to_string(stride), "64"}});
  }
  ExpectErrors({
      BrokenForward{token(4 * kQRow + 2), "q's token stride is 258", "multiple of 4"},
      {head(kQRow + 1), "q's head stride is 65", "multiple of 4"},
      {token(kQRow), "4 heads 64 bytes apart and tokens 64 bytes apart", "overlap"},
      {token(4 * kQRow - 4), "tokens 252 bytes apart", "overlap"},
      {head(kQRow + 4), "4 heads 68 bytes apart", "overlap"},
      // Heads outside: three tokens reach to 192.
      {[](Forward& f) {
         f.task.q.token_stride = kQRow;
         f.task.q.head_stride = 3 * kQRow - 4;
       },
       "4 heads 188 bytes apart", "overlap"},
      {[](Forward& f) {
         f.task.q.token_stride = 0;
         f.task.q.head_stride = 0;
       },
       "stride is 0", "64"},
  });
}

TEST(AttendInputTest, KeysAndValuesOfAnotherDimAreNamed) {
  ExpectErrors({
      BrokenForward{[](Forward& f) { f.task.kv.k.dim = 8; }, "kv.k has dim 8", "the spec has 16"},
      {[](Forward& f) { f.task.kv.v.dim = 0; }, "kv.v has dim 0", "the spec has 24"},
  });
}

TEST(AttendInputTest, StridesBeyondTheAddressSpaceAreNamed) {
  ExpectErrors({
      BrokenForward{[](Forward& f) { f.task.q.token_stride = kHuge; }, "q has 3 tokens",
                    std::to_string(kHuge)},
      {[](Forward& f) { f.task.q.head_stride = kHuge; }, "4 heads", std::to_string(kHuge)},
      {[](Forward& f) { f.task.q.token_stride = kInt64Max / 4 * 4; }, "3 tokens",
       std::to_string(kInt64Max / 4 * 4)},
      {[](Forward& f) { f.task.kv.k.slot_stride = kHuge; }, "k", std::to_string(kHuge)},
      {[](Forward& f) { f.task.kv.v.head_stride = kHuge; }, "v", std::to_string(kHuge)},
      {[](Forward& f) { f.task.kv.slots = kInt64Max; }, "slots", std::to_string(kInt64Max)},
      {[](Forward& f) {  // 2^40 slots are allowed, but not 2^24 bytes apart
         f.task.kv.slots = std::int64_t{1} << 40;
         f.task.kv_positions = Positions::Contiguous(0, f.task.kv.slots);
         f.task.kv.k.slot_stride = std::int64_t{1} << 24;
       },
       "1099511627776 tokens", "16777216 bytes apart"},
  });
}

TEST(AttendInputTest, BadKeysAndValuesAreNamed) {
  ExpectErrors({
      BrokenForward{[](Forward& f) { f.task.kv.k.base = nullptr; }, "kv.k", "null"},
      {[](Forward& f) { f.task.kv.v.base = nullptr; }, "kv.v", "null"},
      {[](Forward& f) { f.task.kv.kv_heads = 4; }, "kv has 4 heads", "2"},
      {[](Forward& f) { f.task.kv.kv_heads = -2; }, "kv has -2 heads", "2"},
      {[](Forward& f) { f.task.kv.slots = 4; }, "4 slots", "5 positions"},
      {[](Forward& f) { f.task.kv.slots = -1; }, "-1 slots", "0 to"},
      {[](Forward& f) { f.task.kv_positions = Positions::Contiguous(0, 6); }, "5 slots",
       "6 positions"},
      {[](Forward& f) { f.task.kv.dtype = static_cast<DType>(9); }, "dtype", "9"},
      {[](Forward& f) { f.task.kv.k.slot_stride = kQRow - 4; }, "k's token stride is 60", "64"},
      {[](Forward& f) { f.task.kv.k.head_stride = 0; }, "k's head stride is 0", "64"},
      {[](Forward& f) { f.task.kv.v.slot_stride = -kVRow; }, "v's token stride is -96", "96"},
      {[](Forward& f) { f.task.kv.v.head_stride = kVRow - 4; }, "v's head stride is 92", "96"},
      {[](Forward& f) { f.task.kv.v.slot_stride = kVRow; }, "tokens 96 bytes apart", "overlap"},
  });
}

TEST(AttendInputTest, BadPagesAreNamed) {
  const auto paged = [](const std::function<void(Forward&)>& change) {
    return [change](Forward& f) {
      f.UsePages();
      change(f);
    };
  };
  ExpectErrors({
      BrokenForward{paged([](Forward& f) { f.task.kv.page_slots = 0; }), "page_slots", "0"},
      {paged([](Forward& f) { f.task.kv.page_slots = -2; }), "page_slots", "-2"},
      {paged([](Forward& f) { f.k_pages[2] = nullptr; }), "k's page 2", "null"},
      {paged([](Forward& f) { f.v_pages[0] = nullptr; }), "v's page 0", "null"},
      {paged([](Forward& f) { f.v_pages[1] = Shifted(f.v_pages[1], 2); }), "v's page 1", "4 bytes"},
      {paged([](Forward& f) { f.task.kv.k.slot_stride = kQRow - 4; }), "stride is 60", "64"},
      {paged([](Forward& f) { f.task.kv.k.head_stride = kQRow; }), "2 heads 64 bytes apart",
       "overlap"},
      {paged([](Forward& f) { f.task.kv.v.head_stride = -kVRow; }), "stride is -96", "96"},
      {paged([](Forward& f) { f.task.kv.v.slot_stride = kHuge; }), "2 tokens",
       std::to_string(kHuge)},
  });
}

TEST(AttendInputTest, BadResultsAreNamed) {
  ExpectErrors({
      BrokenForward{[](Forward& f) { f.task.result.v_head_dim = 16; }, "v_head_dim 16", "24"},
      {[](Forward& f) { f.task.result.lse = f.task.result.lse.first(11); }, "lse has 11", "12"},
      {[](Forward& f) { f.task.result.lse = {}; }, "lse has 0", "12"},
      {[](Forward& f) { f.task.result.out = f.task.result.out.first(287); }, "out has 287", "288"},
      {[](Forward& f) {
         f.task.result.out = {static_cast<float*>(nullptr), f.task.result.out.size()};
       },
       "result.out", "null"},
      {[](Forward& f) {
         f.task.result.lse = {static_cast<float*>(nullptr), f.task.result.lse.size()};
       },
       "result.lse", "null"},
      {[](Forward& f) {
         f.task.result.out = {const_cast<float*>(Shifted(f.out.data(), 1)), f.out.size()};
       },
       "result.out is at", "4 bytes"},
  });
}

TEST(AttendInputTest, EitherNestingOfTheStridesIsValid) {
  Forward expected, actual;
  Attend(expected.spec, {&expected.task, 1});
  // All values of q are the same, so [head, token, dim] is the same tensor.
  actual.task.q.token_stride = kQRow;
  actual.task.q.head_stride = kTokens * kQRow;
  Attend(actual.spec, {&actual.task, 1});
  EXPECT_EQ(actual.out, expected.out);
}

TEST(AttendInputTest, NoTasksAtAll) {
  const AttentionSpec spec = AttentionSpec::Make(4, 2, 16);
  EXPECT_NO_THROW(Attend(spec, {}));
  EXPECT_NO_THROW(AttendBackward(spec, {}));
}

TEST(AttendInputTest, NoTokensNeedNoMemory) {
  ThreadPool pool(2, std::chrono::microseconds(0));
  for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
    for (std::int64_t slots : {std::int64_t{0}, kSlots}) {
      Backward b;
      AttendTask task = b.task;
      task.q = TensorView::Dense(nullptr, DType::kF32, 0, 4, 16);
      task.q_positions = {};
      task.result = {{}, {}, 24};
      BackwardTask g = b.gradients;
      g.q = task.q;
      g.q_positions = {};
      g.out = g.d_out = TensorView::Dense(nullptr, DType::kF32, 0, 4, 24);
      g.lse = {};
      g.dq = GradView::Dense(nullptr, 0, 4, 16);
      if (slots == 0) {
        task.kv = KvView::Strided(TensorView::Dense(nullptr, DType::kF32, 0, 2, 16),
                                  TensorView::Dense(nullptr, DType::kF32, 0, 2, 24));
        g.dk = GradView::Dense(nullptr, 0, 2, 16);
        g.dv = GradView::Dense(nullptr, 0, 2, 24);
      }
      task.kv_positions = Positions::Contiguous(0, slots);
      g.kv = task.kv;
      g.kv_positions = task.kv_positions;
      EXPECT_NO_THROW(Attend(b.spec, {&task, 1}, {.pool = threads}));
      EXPECT_NO_THROW(AttendBackward(b.spec, {&g, 1}, {.pool = threads}));
      EXPECT_TRUE(b.Untouched());
    }
  }
}

TEST(AttendInputTest, NoSlotsGiveTheIdentity) {
  ThreadPool pool(2, std::chrono::microseconds(0));
  for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
    for (std::int64_t tokens : {kTokens, std::int64_t{40}}) {  // decoded, tiled
      Backward b;
      std::vector<float> q(static_cast<std::size_t>(tokens) * 4 * 16, 0.5f);
      std::vector<float> out(static_cast<std::size_t>(tokens) * 4 * 24, kUntouched);
      std::vector<float> lse(static_cast<std::size_t>(tokens) * 4, kUntouched);
      AttendTask task;
      task.q = TensorView::Dense(q.data(), DType::kF32, tokens, 4, 16);
      task.q_positions = Positions::Contiguous(0, tokens);
      task.kv = KvView::Strided(TensorView::Dense(nullptr, DType::kF32, 0, 2, 16),
                                TensorView::Dense(nullptr, DType::kF32, 0, 2, 24));
      task.result = {out, lse, 24};
      Attend(b.spec, {&task, 1}, {.pool = threads});
      EXPECT_THAT(out, Each(0.0f));
      EXPECT_THAT(lse, Each(kNoKeys));

      b.gradients.kv = task.kv;
      b.gradients.kv_positions = {};
      b.gradients.dk = GradView::Dense(nullptr, 0, 2, 16);
      b.gradients.dv = GradView::Dense(nullptr, 0, 2, 24);
      EXPECT_NO_THROW(AttendBackward(b.spec, {&b.gradients, 1}, {.pool = threads}));
      EXPECT_TRUE(b.Untouched());
    }
  }
}

}  // namespace
}  // namespace treeline::test
