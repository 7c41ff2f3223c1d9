#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

// TREELINE_PROGRAM is the program's path.

namespace treeline::test {

struct Outcome {
  int code;
  std::string output;  // standard output
  std::string error;   // standard error
};

inline Outcome RunProgram(const std::string& arguments, const std::string& environment = "") {
  const std::string error_file = testing::TempDir() + "treeline_stderr_" + std::to_string(getpid());
  const std::string command =
      environment + " '" TREELINE_PROGRAM "' " + arguments + " 2>'" + error_file + "'";
  Outcome outcome;
  FILE* pipe = popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  while (const std::size_t n = fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), n);
  }
  outcome.code = WEXITSTATUS(pclose(pipe));
  std::ifstream stream(error_file);
  outcome.error.assign(std::istreambuf_iterator<char>(stream), {});
  std::filesystem::remove(error_file);
  return outcome;
}

// An exit code, and one line that starts as agreed and contains `part`.
inline void ExpectError(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.error;
  EXPECT_EQ(outcome.error.rfind("treeline: error: ", 0), 0u) << outcome.error;
  EXPECT_NE(outcome.error.find(part), std::string::npos) << outcome.error;
  EXPECT_EQ(std::count(outcome.error.begin(), outcome.error.end(), '\n'), 1) << outcome.error;
  EXPECT_EQ(outcome.output, "");
}

inline void ExpectUsageError(const Outcome& outcome, const std::string& part) {
  ExpectError(outcome, 2, part);
}

}  // namespace treeline::test
