#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "backend/broken_tasks.h"
#include "treeline/attention.h"
#include "treeline/errors.h"
#include "treeline/isa.h"

namespace treeline::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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
}  // namespace treeline::test
