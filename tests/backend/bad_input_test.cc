#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "treeline/attention.h"
#include "treeline/errors.h"
#include "treeline/isa.h"
#include "treeline/thread_pool.h"

namespace treeline {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kInt64Min = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kHuge = std::int64_t{1} << 62;
constexpr float kUntouched = 12345.0f;

constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kSlots = 5;
constexpr std::int64_t kQRow = 64;  // bytes of a row of head_dim 16
constexpr std::int64_t kVRow = 96;  // of v_head_dim 24

template <class T>
const T* Shifted(const T* data, std::ptrdiff_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(data) + bytes);
}
const void* Shifted(const void* data, std::ptrdiff_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

std::string Address(const void* data) {
  std::ostringstream text;
  text << data;
  return text.str();
}

// A small valid task with memory of its own. Tests break one thing of it.
struct Forward {
  Forward() {
    spec.v_head_dim = 24;
    task.q = TensorView::Dense(q.data(), DType::kF32, kTokens, 4, 16);
    task.q_positions = Positions::Contiguous(2, kTokens);
    task.kv = KvView::Strided(TensorView::Dense(k.data(), DType::kF32, kSlots, 2, 16),
                              TensorView::Dense(v.data(), DType::kF32, kSlots, 2, 24));
    task.kv_positions = Positions::Contiguous(0, kSlots);
    task.result = {out, lse, 24};
  }
  Forward(const Forward&) = delete;

  void UsePages() { task.kv = KvView::Paged(k_pages, v_pages, DType::kF32, kSlots, 2, 2, 16, 24); }
  bool Untouched() const {
    const auto same = [](float x) { return x == kUntouched; };
    return std::all_of(out.begin(), out.end(), same) && std::all_of(lse.begin(), lse.end(), same);
  }

  AttentionSpec spec = AttentionSpec::Make(4, 2, 16);
  std::vector<float> q = std::vector<float>(kTokens * 4 * 16, 0.5f);
  std::vector<float> k = std::vector<float>(192, 0.25f);  // 3 pages of 2 slots
  std::vector<float> v = std::vector<float>(288, 2.0f);
  std::vector<float> out = std::vector<float>(kTokens * 4 * 24, kUntouched);
  std::vector<float> lse = std::vector<float>(kTokens * 4, kUntouched);
  std::array<const void*, 3> k_pages{k.data(), k.data() + 64, k.data() + 128};
  std::array<const void*, 3> v_pages{v.data(), v.data() + 96, v.data() + 192};
  AttendTask task;
};

struct Backward : Forward {
  Backward() {
    gradients.q = task.q;
    gradients.q_positions = task.q_positions;
    gradients.kv = task.kv;
    gradients.kv_positions = task.kv_positions;
    gradients.out = TensorView::Dense(final_out.data(), DType::kF32, kTokens, 4, 24);
    gradients.d_out = TensorView::Dense(d_out.data(), DType::kF32, kTokens, 4, 24);
    gradients.lse = final_lse;
    gradients.dq = GradView::Dense(dq.data(), kTokens, 4, 16);
    gradients.dk = GradView::Dense(dk.data(), kSlots, 2, 16);
    gradients.dv = GradView::Dense(dv.data(), kSlots, 2, 24);
  }

  bool Untouched() const {
    const auto same = [](const std::vector<float>& all) {
      return std::all_of(all.begin(), all.end(), [](float x) { return x == kUntouched; });
    };
    return same(dq) && same(dk) && same(dv);
  }

  std::vector<float> final_out = std::vector<float>(kTokens * 4 * 24, 2.0f);
  std::vector<float> d_out = std::vector<float>(kTokens * 4 * 24, 1.0f);
  std::vector<float> final_lse = std::vector<float>(kTokens * 4, 3.0f);
  std::vector<float> dq = std::vector<float>(kTokens * 4 * 16, kUntouched);
  std::vector<float> dk = std::vector<float>(kSlots * 2 * 16, kUntouched);
  std::vector<float> dv = std::vector<float>(kSlots * 2 * 24, kUntouched);
  BackwardTask gradients;
};

// What is broken, and two parts of the message: the thing and the value.
template <class Task>
struct Broken {
  std::function<void(Task&)> change;
  std::string thing;
  std::string value;
};
using BrokenForward = Broken<Forward>;
using BrokenBackward = Broken<Backward>;

// Alone, and after a valid task: nothing of either is written.
void ExpectErrors(const std::vector<BrokenForward>& cases) {
  for (const auto& [change, thing, value] : cases) {
    SCOPED_TRACE(::testing::Message() << thing << " … " << value);
    Forward good, bad;
    change(bad);
    const std::vector<AttendTask> tasks{good.task, bad.task};
    EXPECT_THAT(
        [&] {
          Attend(bad.spec, {&bad.task, 1});
        },
        ThrowsMessage<ArgumentError>(AllOf(HasSubstr(thing), HasSubstr(value))));
    EXPECT_THAT([&] { Attend(bad.spec, tasks); },
                ThrowsMessage<ArgumentError>(AllOf(HasSubstr(thing), HasSubstr(value))));
    EXPECT_TRUE(good.Untouched());
    EXPECT_TRUE(bad.Untouched());
  }
}

void ExpectErrors(const std::vector<BrokenBackward>& cases) {
  for (const auto& [change, thing, value] : cases) {
    SCOPED_TRACE(::testing::Message() << thing << " … " << value);
    Backward good, bad;
    change(bad);
    const std::vector<BackwardTask> tasks{good.gradients, bad.gradients};
    EXPECT_THAT(
        [&] {
          AttendBackward(bad.spec, {&bad.gradients, 1});
        },
        ThrowsMessage<ArgumentError>(AllOf(HasSubstr(thing), HasSubstr(value))));
    EXPECT_THAT([&] { AttendBackward(bad.spec, tasks); },
                ThrowsMessage<ArgumentError>(AllOf(HasSubstr(thing), HasSubstr(value))));
    EXPECT_TRUE(good.Untouched());
    EXPECT_TRUE(bad.Untouched());
  }
}

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

TEST(AttendBackwardInputTest, BadSpecIsNamed) {
  ExpectErrors({
      BrokenBackward{[](Backward& b) { b.spec.softcap = -1.5f; }, "softcap", "-1.5"},
      {[](Backward& b) { b.spec.head_dim = 264; }, "head_dim is 264", "256"},
      {[](Backward& b) { b.spec.v_head_dim = 512; }, "v_head_dim 512", "256"},
  });
}

TEST(AttendBackwardInputTest, BadInputsAreNamed) {
  ExpectErrors({
      BrokenBackward{[](Backward& b) { b.gradients.q.data = nullptr; }, "q", "null"},
      {[](Backward& b) { b.gradients.q.data = Shifted(b.gradients.q.data, 1); }, "q is at",
       "4 bytes"},
      {[](Backward& b) { b.gradients.q.dtype = DType::kQ8_0; }, "q is q8_0", "f32, bf16 or f16"},
      {[](Backward& b) { b.gradients.q.heads = 2; }, "q has 2 heads", "4"},
      {[](Backward& b) { b.gradients.q.tokens = kInt64Max; }, "q", std::to_string(kInt64Max)},
      {[](Backward& b) { b.gradients.q_positions = {}; }, "3 tokens", "0 positions"},
      {[](Backward& b) { b.gradients.kv.dtype = DType::kQ8_0; }, "kv is q8_0", "f32, bf16 or f16"},
      {[](Backward& b) { b.gradients.kv.k.base = nullptr; }, "kv.k", "null"},
      {[](Backward& b) { b.gradients.kv.v.slot_stride = 4; }, "stride is 4", "96"},
      {[](Backward& b) { b.gradients.kv_positions = {}; }, "5 slots", "0 positions"},
      {[](Backward& b) { b.gradients.lse = b.gradients.lse.first(8); }, "lse has 8", "12"},
      {[](Backward& b) {
         b.gradients.lse = {static_cast<const float*>(nullptr), 12};
       },
       "lse", "null"},
  });
}

TEST(AttendBackwardInputTest, BadOutputsOfForwardAreNamed) {
  struct Field {
    std::string name;
    TensorView BackwardTask::*view;
  };
  for (const Field& field :
       {Field{"out", &BackwardTask::out}, Field{"d_out", &BackwardTask::d_out}}) {
    const std::string& name = field.name;
    const auto change = [&field](const std::function<void(TensorView&)>& edit) {
      return [edit, view = field.view](Backward& b) { edit(b.gradients.*view); };
    };
    ExpectErrors({
        BrokenBackward{change([](TensorView& t) { t.data = nullptr; }), name, "null"},
        {change([](TensorView& t) { t.data = Shifted(t.data, 2); }), name + " is at", "4 bytes"},
        {change([](TensorView& t) { t.dtype = DType::kBF16; }), name + " is bf16", "f32"},
        {change([](TensorView& t) { t.tokens = 4; }), name + " has 4 tokens", "3"},
        {change([](TensorView& t) { t.heads = 1; }), name + " has 1 heads", "4"},
        {change([](TensorView& t) { t.dim = 16; }), name + " has dim 16", "24"},
        {change([](TensorView& t) { t.token_stride = 0; }), name, "stride is 0"},
        {change([](TensorView& t) { t.head_stride = -96; }), name, "stride is -96"},
        {change([](TensorView& t) { t.token_stride = kVRow; }), name, "overlap"},
        {change([](TensorView& t) { t.token_stride = kHuge; }), name, std::to_string(kHuge)},
    });
  }
}

TEST(AttendBackwardInputTest, BadGradientsAreNamed) {
  struct Field {
    std::string name;
    GradView BackwardTask::*view;
    std::int64_t tokens;
    int heads;
    int dim;
  };
  for (const Field& field : {Field{"dq", &BackwardTask::dq, kTokens, 4, 16},
                             Field{"dk", &BackwardTask::dk, kSlots, 2, 16},
                             Field{"dv", &BackwardTask::dv, kSlots, 2, 24}}) {
    const std::string& name = field.name;
    const std::int64_t row = std::int64_t{field.dim} * 4;
    const auto change = [&field](const std::function<void(GradView&)>& edit) {
      return [edit, view = field.view](Backward& b) { edit(b.gradients.*view); };
    };
    ExpectErrors({
        BrokenBackward{change([](GradView& g) { g.data = nullptr; }), name, "null"},
        {change([](GradView& g) { g.data = const_cast<float*>(Shifted(g.data, 2)); }),
         name + " is at", "4 bytes"},
        {change([](GradView& g) { g.tokens = 7; }), name + " has 7 tokens",
         std::to_string(field.tokens)},
        {change([](GradView& g) { g.tokens = kInt64Max; }), name, std::to_string(kInt64Max)},
        {change([](GradView& g) { g.heads = 8; }), name + " has 8 heads",
         std::to_string(field.heads)},
        {change([](GradView& g) { g.dim = 8; }), name + " has dim 8", std::to_string(field.dim)},
        {change([row](GradView& g) { g.token_stride = row - 4; }), name + "'s token stride",
         std::to_string(row - 4)},
        {change([](GradView& g) { g.head_stride = 0; }), name + "'s head stride", "0 bytes"},
        {change([row](GradView& g) { g.head_stride = -row; }), name + "'s head stride",
         std::to_string(-row)},
        {change([row](GradView& g) { g.token_stride = row; }), name, "overlap"},
        {change([](GradView& g) { g.token_stride += 2; }), name, "multiple of 4"},
        {change([](GradView& g) { g.head_stride = kHuge; }), name, std::to_string(kHuge)},
    });
  }
}

TEST(SinksBackwardInputTest, BadInputsAreNamed) {
  Backward b;
  b.spec.sinks.assign(4, 0.5f);
  std::vector<float> d_sinks(4, kUntouched);
  const auto expect = [&](const AttentionSpec& spec, const TensorView& out, const TensorView& d_out,
                          std::span<const float> lse, std::span<float> target,
                          const char* message) {
    EXPECT_THAT([&] { SinksBackward(spec, out, d_out, lse, target); },
                ThrowsMessage<ArgumentError>(HasSubstr(message)));
    EXPECT_THAT(d_sinks, Each(kUntouched));
  };
  const BackwardTask& g = b.gradients;
  AttentionSpec no_sinks = b.spec;
  no_sinks.sinks.clear();
  TensorView short_out = g.out, null_out = g.out;
  short_out.tokens = 2;
  null_out.data = nullptr;
  const std::span<float> target(d_sinks);
  expect(no_sinks, g.out, g.d_out, g.lse, target, "no sinks");
  expect(b.spec, g.out, g.d_out, g.lse, target.first(3), "d_sinks has 3");
  expect(b.spec, g.out, g.d_out, g.lse.first(10), target, "lse has 10");
  expect(b.spec, short_out, g.d_out, g.lse, target, "d_out has 3 tokens");
  expect(b.spec, null_out, g.d_out, g.lse, target, "out is null");
  SinksBackward(b.spec, g.out, g.d_out, g.lse, target);
  EXPECT_NE(d_sinks[0], kUntouched);
}

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
class UnusedStrideTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(UnusedStrideTest, OneTokenNeedsNoTokenStride) {
  Forward expected, actual;
  for (Forward* f : {&expected, &actual}) {
    f->task.q.tokens = 1;
    f->task.q_positions = Positions::Contiguous(4, 1);
    f->task.kv.slots = 1;
    f->task.kv_positions = Positions::Contiguous(0, 1);
    f->task.result = {std::span(f->out).first(96), std::span(f->lse).first(4), 24};
  }
  Attend(expected.spec, {&expected.task, 1});
  actual.task.q.token_stride = GetParam();
  actual.task.kv.k.slot_stride = GetParam();
  actual.task.kv.v.slot_stride = GetParam();
  Attend(actual.spec, {&actual.task, 1});
  EXPECT_EQ(actual.out, expected.out);
  EXPECT_EQ(actual.lse, expected.lse);
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
  Attend(expected.spec, {&expected.task, 1});
  actual.task.q.head_stride = GetParam();
  actual.task.kv.k.head_stride = GetParam();
  actual.task.kv.v.head_stride = GetParam();
  Attend(actual.spec, {&actual.task, 1});
  EXPECT_EQ(actual.out, expected.out);
  EXPECT_EQ(actual.lse, expected.lse);
}

TEST_P(UnusedStrideTest, PagesOfOneSlotNeedNoSlotStride) {
  Forward expected, actual;
  for (Forward* f : {&expected, &actual}) {
    f->task.kv = KvView::Paged(f->k_pages, f->v_pages, DType::kF32, 3, 1, 2, 16, 24);
    f->task.kv_positions = Positions::Contiguous(0, 3);
  }
  Attend(expected.spec, {&expected.task, 1});
  actual.task.kv.k.slot_stride = GetParam();
  actual.task.kv.v.slot_stride = GetParam();
  Attend(actual.spec, {&actual.task, 1});
  EXPECT_EQ(actual.out, expected.out);
  EXPECT_EQ(actual.lse, expected.lse);
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

// Sets TREELINE_ISA for a scope.
class ScopedIsa {
 public:
  explicit ScopedIsa(const std::string& name) {
    if (const char* before = std::getenv("TREELINE_ISA")) before_ = before;
    setenv("TREELINE_ISA", name.c_str(), /*overwrite=*/1);
  }
  ~ScopedIsa() {
    if (before_) {
      setenv("TREELINE_ISA", before_->c_str(), /*overwrite=*/1);
    } else {
      unsetenv("TREELINE_ISA");
    }
  }

 private:
  std::optional<std::string> before_;
};

// One that exists, but not on this CPU: no CPU has both NEON and SSE4.
Isa Unattainable() {
  const std::vector<Isa>& isas = AttainableIsas();
  return std::find(isas.begin(), isas.end(), Isa::kNeon) == isas.end() ? Isa::kNeon : Isa::kSse4;
}

std::string AttainableNames() {
  std::string names;
  for (Isa isa : AttainableIsas()) names += (names.empty() ? "" : ", ") + std::string(Name(isa));
  return names;
}

TEST(IsaTest, BadEnvironmentIsNamedAndTheAttainableListed) {
  for (const std::string& name :
       {std::string("quantum"), std::string("AVX2"), std::string(Name(Unattainable()))}) {
    const ScopedIsa scope(name);
    const auto error = ThrowsMessage<ArgumentError>(AllOf(
        HasSubstr("TREELINE_ISA"), HasSubstr("'" + name + "'"), HasSubstr(AttainableNames())));
    Backward b;
    EXPECT_THAT([] { DefaultIsa(); }, error);
    EXPECT_THAT([&] { Attend(b.spec, {&b.task, 1}); }, error);
    EXPECT_THAT([&] { AttendBackward(b.spec, {&b.gradients, 1}); }, error);
    EXPECT_THAT([&] { MergeInto(b.task.result, b.task.result); }, error);
    EXPECT_TRUE(b.Untouched());
    EXPECT_TRUE(b.Forward::Untouched());
    // A call that says what it wants does not look at the environment.
    EXPECT_NO_THROW(Attend(b.spec, {&b.task, 1}, {.isa = AttainableIsas().front()}));
  }
}

TEST(IsaTest, EnvironmentChoosesAnyAttainable) {
  for (Isa isa : AttainableIsas()) {
    const ScopedIsa scope{std::string(Name(isa))};
    EXPECT_EQ(DefaultIsa(), isa);
  }
  const ScopedIsa scope("");
  EXPECT_EQ(DefaultIsa(), AttainableIsas().back());
}

TEST(IsaTest, UnattainableContextIsNamedAndTheAttainableListed) {
  Backward b;
  const std::string name(Name(Unattainable()));
  const Context context{.isa = Unattainable()};
  const auto error = ThrowsMessage<ArgumentError>(
      AllOf(HasSubstr("'" + name + "'"), HasSubstr(AttainableNames())));
  EXPECT_THAT([&] { Attend(b.spec, {&b.task, 1}, context); }, error);
  EXPECT_THAT([&] { AttendBackward(b.spec, {&b.gradients, 1}, context); }, error);
  EXPECT_THAT([&] { ParseIsa(name); }, error);
  EXPECT_TRUE(b.Untouched());
  EXPECT_TRUE(b.Forward::Untouched());
  EXPECT_THAT(
      [&] {
        Attend(b.spec, {&b.task, 1}, {.isa = static_cast<Isa>(99)});
      },
      ThrowsMessage<ArgumentError>(HasSubstr("99")));
}

TEST(IsaTest, NamesRoundTrip) {
  for (Isa isa : AttainableIsas()) EXPECT_EQ(ParseIsa(Name(isa)), isa);
  EXPECT_EQ(AttainableIsas().front(), Isa::kScalar);
}

}  // namespace
}  // namespace treeline
