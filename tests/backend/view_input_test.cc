#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "backend/broken_tasks.h"

namespace treeline::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(KvViewTest, SidesThatDifferAreNamed) {
  const TensorView k = TensorView::Dense(nullptr, DType::kF32, 5, 2, 16);
  TensorView v = k;
  v.tokens = 6;
  EXPECT_THAT([&] { KvView::Strided(k, v); },
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("5 tokens"), HasSubstr("6"))));
  v = k;
  v.heads = 3;
  EXPECT_THAT([&] { KvView::Strided(k, v); },
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("2 heads"), HasSubstr("3"))));
  v = k;
  v.dtype = DType::kF16;
  EXPECT_THAT([&] { KvView::Strided(k, v); },
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("f32"), HasSubstr("f16"))));
}

TEST(KvViewTest, BadPagesAreNamed) {
  const std::vector<float> memory(64);
  std::vector<const void*> pages(3, memory.data());
  const auto paged = [&](std::int64_t slots, std::int64_t page_slots) {
    return [=, &pages] { KvView::Paged(pages, pages, DType::kF32, slots, page_slots, 1, 8, 8); };
  };
  EXPECT_NO_THROW(paged(5, 2)());
  EXPECT_THAT(paged(5, 0), ThrowsMessage<ArgumentError>(HasSubstr("page_slots is 0")));
  EXPECT_THAT(paged(5, -1), ThrowsMessage<ArgumentError>(HasSubstr("page_slots is -1")));
  EXPECT_THAT(paged(-1, 2), ThrowsMessage<ArgumentError>(HasSubstr("slots is -1")));
  EXPECT_THAT(paged(7, 2), ThrowsMessage<ArgumentError>(
                               AllOf(HasSubstr("7 slots need 4 pages of 2"), HasSubstr("3"))));
  EXPECT_THAT(paged(kInt64Max, 1), ThrowsMessage<ArgumentError>(HasSubstr("9223372036854775807")));
  EXPECT_THAT(paged(5, kInt64Max),
              ThrowsMessage<ArgumentError>(HasSubstr("9223372036854775807 rows of 32 bytes")));
  pages[1] = nullptr;
  EXPECT_THAT(paged(5, 2), ThrowsMessage<ArgumentError>(HasSubstr("page 1 is null")));
  EXPECT_NO_THROW(paged(2, 2)()) << "pages beyond the slots in use are not looked at";
}

TEST(TensorViewTest, RowsTooLargeToAddressAreNamed) {
  constexpr int kMax = std::numeric_limits<int>::max();
  EXPECT_THAT([] { TensorView::Dense(nullptr, DType::kF32, 1, kMax, kMax); },
              ThrowsMessage<ArgumentError>(HasSubstr("2147483647 rows of 8589934588 bytes")));
  EXPECT_THAT([] { GradView::Dense(nullptr, 1, kMax, kMax); },
              ThrowsMessage<ArgumentError>(HasSubstr("2147483647 rows of 8589934588 bytes")));
}

// Strides that lead nowhere, because there is one token or one head, may hold anything.
class UnusedStrideTest : public ::testing::TestWithParam<std::int64_t> {
 protected:
  static void ExpectSameResults(Forward& expected, Forward& actual) {
    Attend(expected.spec, {&expected.task, 1});
    Attend(actual.spec, {&actual.task, 1});
    EXPECT_FALSE(expected.Untouched());
    EXPECT_EQ(actual.out, expected.out);
    EXPECT_EQ(actual.lse, expected.lse);
  }
};

TEST_P(UnusedStrideTest, OneTokenNeedsNoTokenStride) {
  Forward expected, actual;
  for (Forward* f : {&expected, &actual}) {
    f->task.q.tokens = 1;
    f->task.q_positions = Positions::Contiguous(4, 1);
    f->task.kv.slots = 1;
    f->task.kv_positions = Positions::Contiguous(0, 1);
    f->task.result = {std::span(f->out).first(96), std::span(f->lse).first(4), 24};
  }
  actual.task.q.token_stride = GetParam();
  actual.task.kv.k.slot_stride = GetParam();
  actual.task.kv.v.slot_stride = GetParam();
  ExpectSameResults(expected, actual);
}

TEST_P(UnusedStrideTest, OneHeadNeedsNoHeadStride) {
  Forward expected, actual;
  for (Forward* f : {&expected, &actual}) {
    f->spec.heads = f->spec.kv_heads = 1;
    f->task.q = TensorView::Dense(f->q.data(), DType::kF32, kTokens, 1, 16);
    f->task.kv = KvView::Strided(TensorView::Dense(f->k.data(), DType::kF32, kSlots, 1, 16),
                                 TensorView::Dense(f->v.data(), DType::kF32, kSlots, 1, 24));
    f->task.result = {std::span(f->out).first(72), std::span(f->lse).first(3), 24};
  }
  actual.task.q.head_stride = GetParam();
  actual.task.kv.k.head_stride = GetParam();
  actual.task.kv.v.head_stride = GetParam();
  ExpectSameResults(expected, actual);
}

TEST_P(UnusedStrideTest, PagesOfOneSlotNeedNoSlotStride) {
  Forward expected, actual;
  for (Forward* f : {&expected, &actual}) {
    f->task.kv = KvView::Paged(f->k_pages, f->v_pages, DType::kF32, 3, 1, 2, 16, 24);
    f->task.kv_positions = Positions::Contiguous(0, 3);
  }
  actual.task.kv.k.slot_stride = GetParam();
  actual.task.kv.v.slot_stride = GetParam();
  ExpectSameResults(expected, actual);
}

TEST_P(UnusedStrideTest, BackwardOfOneTokenAndSlot) {
  Backward expected, actual;
  for (Backward* b : {&expected, &actual}) {
    BackwardTask& g = b->gradients;
    g.q.tokens = g.out.tokens = g.d_out.tokens = g.dq.tokens = 1;
    g.kv.slots = g.dk.tokens = g.dv.tokens = 1;
    g.q_positions = g.kv_positions = Positions::Contiguous(0, 1);
    g.lse = g.lse.first(4);
  }
  AttendBackward(expected.spec, {&expected.gradients, 1});
  BackwardTask& g = actual.gradients;
  g.q.token_stride = g.out.token_stride = g.d_out.token_stride = g.dq.token_stride = GetParam();
  g.kv.k.slot_stride = g.kv.v.slot_stride = GetParam();
  g.dk.token_stride = g.dv.token_stride = GetParam();
  AttendBackward(actual.spec, {&actual.gradients, 1});
  EXPECT_EQ(actual.dq, expected.dq);
  EXPECT_EQ(actual.dk, expected.dk);
  EXPECT_EQ(actual.dv, expected.dv);
}

INSTANTIATE_TEST_SUITE_P(Strides, UnusedStrideTest,
                         ::testing::Values(0, -7, 1, kInt64Min, kInt64Max));

}  // namespace
}  // namespace treeline::test
