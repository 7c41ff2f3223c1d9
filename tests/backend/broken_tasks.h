#pragma once

// Valid tasks of which tests break one thing at a time.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "treeline/attention.h"
#include "treeline/errors.h"

namespace treeline::test {

inline constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t kInt64Min = std::numeric_limits<std::int64_t>::min();
inline constexpr std::int64_t kHuge = std::int64_t{1} << 62;
inline constexpr float kUntouched = 12345.0f;

inline constexpr std::int64_t kTokens = 3;
inline constexpr std::int64_t kSlots = 5;
inline constexpr std::int64_t kQRow = 64;  // bytes of a row of head_dim 16
inline constexpr std::int64_t kVRow = 96;  // of v_head_dim 24

template <class T>
const T* Shifted(const T* data, std::ptrdiff_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(data) + bytes);
}
inline const void* Shifted(const void* data, std::ptrdiff_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

inline std::string Address(const void* data) {
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

// Alone, and after a valid task: nothing of either is written. `task` is what `call` takes of a
// problem.
template <class Problem, class Task, class Call>
void ExpectErrorsOf(const std::vector<Broken<Problem>>& cases, Task Problem::*task,
                    const Call& call) {
  for (const auto& [change, thing, value] : cases) {
    SCOPED_TRACE(testing::Message() << thing << " … " << value);
    Problem good, bad;
    change(bad);
    const std::vector<Task> alone{bad.*task};
    const std::vector<Task> second{good.*task, bad.*task};
    for (const std::vector<Task>& tasks : {alone, second}) {
      EXPECT_THAT([&] { call(bad.spec, tasks); },
                  testing::ThrowsMessage<ArgumentError>(
                      testing::AllOf(testing::HasSubstr(thing), testing::HasSubstr(value))));
    }
    EXPECT_TRUE(good.Untouched());
    EXPECT_TRUE(bad.Untouched());
  }
}

inline void ExpectErrors(const std::vector<BrokenForward>& cases) {
  ExpectErrorsOf(cases, &Forward::task,
                 [](const auto& spec, const auto& tasks) { Attend(spec, tasks); });
}

inline void ExpectErrors(const std::vector<BrokenBackward>& cases) {
  ExpectErrorsOf(cases, &Backward::gradients,
                 [](const auto& spec, const auto& tasks) { AttendBackward(spec, tasks); });
}

}  // namespace treeline::test
