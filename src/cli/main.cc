#include <malloc.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <thread>

#include "cli/command.h"
#include "cli/machine.h"
#include "cli/ranks.h"
#include "treeline/errors.h"

namespace {

using treeline::cli::ExitCode;
using enum ExitCode;

// One line on standard error, whatever the message holds, and written at once: other ranks may
// write, too. Cannot throw.
int Fail(ExitCode code, const char* message, const char* hint = "") {
  std::array<char, 4096> line;
  const int length =
      std::snprintf(line.data(), line.size() - 1, "treeline: error: %s%s", message, hint);
  char* const end = line.data() + std::min<std::size_t>(length, line.size() - 2);
  // A message may quote a file: control characters are none of a terminal's business.
  std::replace_if(
      line.data(), end, [](unsigned char c) { return c < ' ' || c == 0x7F; }, ' ');
  *end = '\n';
  std::fwrite(line.data(), 1, static_cast<std::size_t>(end + 1 - line.data()), stderr);
  return code;
}

// For errors that are mostly the same on all ranks: the first says them. The others end with it,
// unless it does not have them.
int FailAlike(ExitCode code, const char* message, const char* hint = "") {
  if (treeline::cli::IsFirst()) return Fail(code, message, hint);
  std::this_thread::sleep_for(std::chrono::seconds(2));
  const std::string with_rank =
      "rank " + std::to_string(treeline::cli::ProcessRank()) + ": " + message;
  return Fail(code, with_rank.c_str(), hint);
}

// Keeps large buffers that are freed, so that the next step gets the same pages again. Otherwise a
// schedule with large buffers would be timed with the system's handing out of pages.
void KeepFreedMemory() {
#if defined(__GLIBC__)
  constexpr int kNever = 1 << 30;
  mallopt(M_MMAP_THRESHOLD, kNever);
  mallopt(M_TRIM_THRESHOLD, kNever);
  mallopt(M_ARENA_MAX, 1);  // the others cannot hold large buffers
#endif
}

int Run(int argc, char** argv) {
  CLI::App program("Exact attention over sequences that no single device holds.", "treeline");
  program.set_version_flag("--version", "treeline " + treeline::cli::DescribeMachine().version);
  program.set_help_all_flag("--help-all", "Print the help of every command");
  program.footer(
      "The environment variable TREELINE_ISA forces an instruction set: scalar, sse4, avx2, "
      "avx512, "
      "avx512-bf16, amx\nor neon.\nExit codes: 0 success, 1 failure, 2 usage, 3 communication, 4 "
      "bad file.");
  treeline::cli::AddModel(program);
  treeline::cli::AddGenerate(program);
  treeline::cli::AddChat(program);
  treeline::cli::AddPerplexity(program);
  treeline::cli::AddTokenize(program);
  treeline::cli::AddInfo(program);
  treeline::cli::AddVerify(program);
  treeline::cli::AddBench(program);
  try {
    program.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help or --version
    return treeline::cli::IsFirst() ? program.exit(request) : kSuccess;
  }
  if (program.get_subcommands().empty()) {
    throw treeline::ArgumentError("a command is required; see treeline --help");
  }
  return kSuccess;
}

// The exit code of a command, whose error has been said.
int RunOrFail(int argc, char** argv) {
  try {
    const int code = Run(argc, argv);
    treeline::cli::FlushOutput();
    treeline::cli::LeaveRanks();
    return code;
  } catch (const CLI::ParseError& error) {
    return FailAlike(kUsage, error.what(), " (see treeline --help)");
  } catch (const treeline::ArgumentError& error) {
    return FailAlike(kUsage, error.what());
  } catch (const treeline::CommError& error) {
    return Fail(kCommunication, error.what());
  } catch (const treeline::FormatError& error) {
    return FailAlike(kBadFile, error.what());
  } catch (const std::bad_alloc&) {
    return Fail(kOther, "out of memory");
  } catch (const std::exception& error) {
    return FailAlike(kOther, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  KeepFreedMemory();
  std::signal(SIGPIPE, SIG_IGN);  // a pipe that nobody reads is an error, which is said
  const int code = RunOrFail(argc, argv);
  if (code != kSuccess) treeline::cli::EndRanks(code);
  return code;
}
