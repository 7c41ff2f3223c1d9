#include "cli/command.h"

#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>

#include "cli/machine.h"
#include "cli/ranks.h"
#include "core/check.h"

namespace treeline::cli {

CLI::Option* AddJsonOption(CLI::App& command, std::string& file) {
  return command
      .add_option("--json", file, "Write the result as JSON to FILE; - is standard output")
      ->type_name("FILE");
}

CLI::Option* AddThreadsOption(CLI::App& command, int& threads) {
  threads = DescribeMachine().cores;
  return command.add_option("--threads", threads, "Threads to use")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str()
      ->type_name("N");
}

void WriteJson(const std::string& file, const nlohmann::ordered_json& json) {
  if (file.empty() || !IsFirst()) return;
  // Text may hold half a character: it is replaced.
  const std::string text =
      json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (file == "-") {
    std::cout << text;
    return FlushOutput();
  }
  errno = 0;
  std::ofstream stream(file);
  stream << text;
  stream.close();
  if (!stream) {
    Throw<Error>("cannot write '", file, "': ", std::strerror(errno != 0 ? errno : EIO));
  }
}

void FlushOutput() {
  errno = 0;
  std::cout.flush();
  std::fflush(stdout);
  if (std::cout && std::ferror(stdout) == 0) return;
  Throw<Error>("cannot write to standard output: ",
               errno != 0 ? std::strerror(errno) : "an earlier part was not written");
}

Progress::Progress(std::string what, std::size_t total)
    : what_(std::move(what)),
      total_(total),
      shown_(total > 0 && IsFirst() && isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_ && last_percent_ >= 0) std::fputs("\r\033[K", stderr);
}

void Progress::Set(std::size_t done) {
  if (!shown_) return;
  const int percent = static_cast<int>(100 * done / total_);
  if (percent == last_percent_) return;
  last_percent_ = percent;
  constexpr int kWidth = 30;
  std::string bar(static_cast<std::size_t>(percent * kWidth / 100), '#');
  bar.resize(kWidth, '.');
  std::fprintf(stderr, "\r%s [%s] %3d%% (%zu/%zu)\033[K", what_.c_str(), bar.c_str(), percent, done,
               total_);
}

}  // namespace treeline::cli
