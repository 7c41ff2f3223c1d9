// The program as a user meets it: exit codes, one-line errors, JSON.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/run_program.h"

using treeline::test::ExpectUsageError;
using treeline::test::Outcome;
using treeline::test::RunProgram;

namespace {

TEST(Program, UsageErrors) {
  ExpectUsageError(RunProgram(""), "a command is required");
  ExpectUsageError(RunProgram("frobnicate"), "frobnicate");
  ExpectUsageError(RunProgram("verify --cases 0"), "0");
  ExpectUsageError(RunProgram("verify --cases many"), "many");
  ExpectUsageError(RunProgram("info --threads 0"), "--threads");
  ExpectUsageError(RunProgram("bench"), "kernel");
  ExpectUsageError(RunProgram("bench kernel --case sorting"), "sorting");
  ExpectUsageError(RunProgram("bench kernel --dtype f64"), "f64");
  ExpectUsageError(RunProgram("bench kernel --head-dim 100"), "head_dim is 100");
  ExpectUsageError(RunProgram("bench kernel --heads 9 --kv-heads 4"), "kv_heads is 4");
  ExpectUsageError(RunProgram("bench kernel --case backward --dtype q8_0"), "--dtype");
}

TEST(Program, UnknownInstructionSet) {
  ExpectUsageError(RunProgram("info", "TREELINE_ISA=mmx"), "mmx");
  ExpectUsageError(RunProgram("verify --cases 1", "TREELINE_ISA=mmx"), "scalar");
}

#ifdef DENY_TILES
// Whether the CPU has them or not: nothing is killed, and whoever asks for them is told why not.
TEST(Program, WithoutPermissionThereAreNoTiles) {
  ExpectUsageError(RunProgram("info", "TREELINE_ISA=amx '" DENY_TILES "'"), "AMX");
  const Outcome outcome = RunProgram("info --json -", "'" DENY_TILES "'");
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const auto report = nlohmann::json::parse(outcome.output);
  EXPECT_TRUE(report["limits"]["amx_gflops"].is_null());
  for (const auto& isa : report["machine"]["isas"]) EXPECT_NE(isa, "amx");
}
#endif

TEST(Program, HelpTeachesEveryCommand) {
  for (const char* command : {"", "info ", "verify ", "bench ", "bench kernel "}) {
    const Outcome outcome = RunProgram(std::string(command) + "--help");
    EXPECT_EQ(outcome.code, 0);
    EXPECT_NE(outcome.output.find("Usage:"), std::string::npos) << command;
  }
  EXPECT_EQ(RunProgram("--version").output.rfind("treeline ", 0), 0u);
}

TEST(Program, VerifyReportsEveryKernel) {
  const Outcome outcome = RunProgram("verify --cases 12 --seed 5 --json -");
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  const auto report = nlohmann::json::parse(outcome.output);
  std::size_t backward = 0;
  for (const auto& row : report["rows"]) {
    EXPECT_TRUE(row["verified"]);
    EXPECT_GE(row["max_error"], 0.0);
    EXPECT_LE(row["max_error"], row["bound"]);
    backward += row["case"] == "backward" && row["arithmetic"] == "f32" ? 1 : 0;
  }
  EXPECT_EQ(backward, report["machine"]["isas"].size());
}

TEST(Program, BenchRowsHaveTheAgreedFields) {
  const std::string file = testing::TempDir() + "treeline_bench.json";
  const Outcome outcome = RunProgram(
      "bench kernel --context 300 --heads 4 --kv-heads 2 --head-dim 64 --batch 2 --repeats 1 "
      "--json '" +
      file + "'");
  ASSERT_EQ(outcome.code, 0) << outcome.error;
  std::ifstream stream(file);
  const auto report = nlohmann::json::parse(stream);
  for (const char* field : {"cpu", "cores", "isa", "commit", "compiler"}) {
    EXPECT_TRUE(report["machine"].contains(field)) << field;
  }
  for (const char* field : {"read_gbps", "fma_gflops", "amx_gflops"}) {
    EXPECT_TRUE(report["limits"].contains(field)) << field;
  }
  ASSERT_EQ(report["rows"].size(), 4u);
  for (const auto& row : report["rows"]) {
    for (const char* field : {"case",
                              "schedule",
                              "layout",
                              "ranks",
                              "threads",
                              "context",
                              "heads",
                              "kv_heads",
                              "head_dim",
                              "dtype",
                              "isa",
                              "median_us",
                              "min_us",
                              "limit_fraction",
                              "bytes_sent_per_rank",
                              "messages_per_rank",
                              "rounds",
                              "peak_bytes_per_rank",
                              "max_error",
                              "verified"}) {
      EXPECT_TRUE(row.contains(field)) << field;
    }
    EXPECT_TRUE(row["verified"]);
    EXPECT_GT(row["median_us"], 0.0);
  }
}

TEST(Program, UnwritableJsonIsAnError) {
  const Outcome outcome = RunProgram("verify --cases 1 --json /nonexistent/report.json");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_NE(outcome.error.find("/nonexistent/report.json"), std::string::npos) << outcome.error;
}

}  // namespace
