#include "model/durable_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <optional>
#include <span>
#include <string>

#include "treeline/errors.h"

namespace treeline::model {
namespace {

namespace fs = std::filesystem;

class DurableFileTest : public testing::Test {
 protected:
  DurableFileTest() { fs::create_directory(folder_); }
  ~DurableFileTest() override { fs::remove_all(folder_); }

  const fs::path folder_ =
      fs::temp_directory_path() / ("treeline-durable-" + std::to_string(getpid()));
  const fs::path path_ = folder_ / "file";
};

void WriteText(NewFile& file, const std::string& text) {
  file.Create();
  file.Write(std::as_bytes(std::span(text)));
  file.Close();
}

TEST_F(DurableFileTest, StaysOnlyIfItIsKept) {
  {
    NewFile file(path_);
    WriteText(file, "text");
    EXPECT_TRUE(fs::exists(path_));
  }
  EXPECT_FALSE(fs::exists(path_));
  {
    NewFile file(path_);
    WriteText(file, "text");
    file.Keep();
  }
  std::ifstream stream(path_);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), "text");
}

TEST_F(DurableFileTest, LeavesTheFilesOfOthersAlone) {
  std::ofstream(path_) << "theirs";
  {
    NewFile file(path_);
    EXPECT_THAT([&] { file.Create(); },
                testing::ThrowsMessage<FormatError>(testing::AllOf(
                    testing::HasSubstr(path_.string()), testing::HasSubstr("File exists"))));
  }
  EXPECT_EQ(fs::file_size(path_), 6u);
}

TEST_F(DurableFileTest, MakesFoldersInFolders) {
  MakeFolder(folder_ / "a" / "b");
  MakeFolder(folder_ / "a" / "b");
  EXPECT_TRUE(fs::is_directory(folder_ / "a" / "b"));
  std::ofstream(path_) << "no folder";
  EXPECT_THAT([&] { MakeFolder(path_ / "c"); },
              testing::ThrowsMessage<FormatError>(testing::HasSubstr(path_.string())));
}

TEST_F(DurableFileTest, ALockIsHeldByOne) {
  const Stop never = false;
  std::optional<FolderLock> first(std::in_place, folder_, never);
  Stop stop = false;
  auto second = std::async(std::launch::async, [&] { const FolderLock lock(folder_, stop); });
  EXPECT_EQ(second.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  stop = true;
  second.get();
  auto third = std::async(std::launch::async, [&] { const FolderLock lock(folder_, never); });
  EXPECT_EQ(third.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  first.reset();
  third.get();
}

}  // namespace
}  // namespace treeline::model
