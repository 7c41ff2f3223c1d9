#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include "c_api/c_api_problem.h"
#include "c_api/guard.h"
#include "treeline/errors.h"

namespace treeline::test {
namespace {

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
}  // namespace treeline::test
