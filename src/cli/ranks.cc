#include "cli/ranks.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "cli/limits.h"
#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"

namespace treeline::cli {
namespace {

// MPI is there once a process, too.
std::optional<MpiWorld> world;
bool joining = false;  // MPI has been started, or is about to be
bool alone = false;    // --comm threads under mpirun

// The arguments of this process, as far as they must be the same on all ranks: all of them.
std::string Arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  std::string arguments = text.str();
  // Without the program's own path, which may differ between hosts.
  arguments.erase(0, std::min(arguments.find('\0'), arguments.size() - 1) + 1);
  if (!arguments.empty()) arguments.pop_back();
  std::replace(arguments.begin(), arguments.end(), '\0', ' ');
  return arguments;
}

// Ends this process; mpirun then ends the others.
[[noreturn]] void EndStuck(double timeout, const char* what) {
  std::fprintf(stderr, "treeline: error: rank %d waited %g s for the other ranks in step %s\n",
               ProcessRank(), timeout, what);
  std::fflush(nullptr);
  std::_Exit(kCommunication);
}

void WarnIfCrowded(const Launch& launch, int threads_per_rank) {
  const unsigned cores = std::thread::hardware_concurrency();
  const auto threads =
      static_cast<unsigned>(launch.host_ranks) * static_cast<unsigned>(threads_per_rank);
  if (launch.rank != 0 || threads <= cores) return;
  std::fprintf(stderr,
               "treeline: note: %d ranks of %d threads share %u cores here; they give way to each "
               "other, and times are those of a crowded machine\n",
               launch.host_ranks, threads_per_rank, cores);
}

}  // namespace

int ProcessRank() noexcept {
  try {
    return FindLaunch().rank;
  } catch (const ArgumentError&) {
    return 0;
  }
}

bool IsFirst() noexcept { return alone || ProcessRank() == 0; }

int RanksHere(int ranks) {
  if (!world) return ranks;
  const std::span<const int> hosts = world->comm().hosts();
  return static_cast<int>(
      std::ranges::count(hosts, hosts[static_cast<std::size_t>(world->comm().rank())]));
}

void AddRankOptions(CLI::App& command, RankOptions& options) {
  command
      .add_option("--comm", options.comm,
                  "Ranks are threads of this process, or processes that mpirun has started "
                  "(default: mpi under mpirun)")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->type_name("WHAT");
  AddTimeoutOption(command, options);
}

void AddTimeoutOption(CLI::App& command, RankOptions& options) {
  command.add_option("--timeout", options.timeout, "Longest wait for another rank")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str()
      ->type_name("SECONDS");
}

std::vector<int> JoinRanks(const RankOptions& options, const std::vector<int>& asked,
                           const std::vector<int>& otherwise, int threads_per_rank) {
  const Launch launch = FindLaunch();
  alone = options.comm == "threads";
  if (alone || (options.comm.empty() && launch.ranks == 0)) {
    return asked.empty() ? otherwise : asked;
  }
  Require(launch.ranks > 0,
          "--comm mpi needs processes that mpirun has started: mpirun -n 4 "
          "treeline …");
  for (const int ranks : asked) {
    Require(ranks == launch.ranks, "--ranks is ", ranks, ", but mpirun has started ", launch.ranks,
            " processes");
  }
  WarnIfCrowded(launch, threads_per_rank);
  joining = true;
  world.emplace(MpiWorld::Options{
      .threads_per_rank = threads_per_rank,
      .timeout = options.milliseconds(),
      .identity = Arguments(),
      .stuck = [timeout = options.timeout](const char* what) { EndStuck(timeout, what); }});
  return {launch.ranks};
}

MpiSum SumByMpi() { return world->SumByMpi(); }

Communicator* Processes() { return world ? &world->comm() : nullptr; }

void RunOverRanks(const ThreadRanks& options, const std::function<void(Communicator&)>& body) {
  if (!world) return RunRanks(options, body);
  RunCollective(world->comm(), [&] {
    Require(options.ranks == world->comm().size(), "a run over ", options.ranks, " of ",
            world->comm().size(), " processes");
    body(world->comm());
  });
}

double TimeStep(Communicator& comm, const std::function<void()>& step) {
  Barrier(comm);
  return TimeOnce([&] {
    step();
    Barrier(comm);
  });
}

void FillInBytes(Communicator& comm, Bytes whole, ConstBytes unwritten) {
  if (!world) return;
  std::vector<std::byte> scratch(whole.size());
  AllReduce(comm, whole, scratch, [&](Bytes mine, ConstBytes theirs) {
    const std::size_t size = unwritten.size();
    for (std::size_t i = 0; i < mine.size(); i += size) {
      if (std::memcmp(&mine[i], unwritten.data(), size) != 0) continue;
      std::memcpy(&mine[i], &theirs[i], size);
    }
  });
}

void LeaveRanks() { world.reset(); }

void EndRanks(int exit_code) noexcept {
  if (joining) MpiWorld::End(exit_code);
  std::fflush(nullptr);
  std::_Exit(exit_code);
}

}  // namespace treeline::cli
