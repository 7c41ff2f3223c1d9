#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace treeline::cli {

enum ExitCode { kSuccess = 0, kOther = 1, kUsage = 2, kCommunication = 3, kBadFile = 4 };

// A command failed its own check; the message says which. Exit code 1.
struct CheckFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Each adds one command, whose callback runs it.
void AddInfo(CLI::App& program);
void AddVerify(CLI::App& program);
void AddBench(CLI::App& program);
void AddModel(CLI::App& program);
void AddGenerate(CLI::App& program);
void AddChat(CLI::App& program);
void AddPerplexity(CLI::App& program);
void AddTokenize(CLI::App& program);

// `--json FILE`, the same in every command.
CLI::Option* AddJsonOption(CLI::App& command, std::string& file);
// `--threads N`, the same in every command; the default is every usable core.
CLI::Option* AddThreadsOption(CLI::App& command, int& threads);

// Writes to a file, or to standard output for "-"; does nothing for "". Throws Error if it cannot.
void WriteJson(const std::string& file, const nlohmann::ordered_json& json);

// Throws Error unless all that was printed has been written: nobody may read it any more, or the
// disk may be full.
void FlushOutput();

// A line on standard error that shows how far long work has come; silent where that is no terminal.
class Progress {
 public:
  Progress(std::string what, std::size_t total);
  ~Progress();
  void Set(std::size_t done);

 private:
  std::string what_;
  std::size_t total_;
  bool shown_;
  int last_percent_ = -1;
};

}  // namespace treeline::cli
