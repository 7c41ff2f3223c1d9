#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "c_api/c_api_problem.h"

namespace treeline::test {
namespace {

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

}  // namespace
}  // namespace treeline::test
