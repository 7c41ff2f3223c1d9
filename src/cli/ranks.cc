#include "cli/ranks.h"

#include <sched.h>

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
#include "cli/machine.h"
#include "core/check.h"
#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"

namespace treeline::cli {
namespace {

// MPI is there once a process, too.
std::optional<MpiWorld> world;
bool joining = false;                 // MPI has been started, or is about to be
bool alone = false;                   // --comm threads under mpirun
std::optional<cpu_set_t> host_cores;  // of all ranks here; only where ranks are processes

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

// Those that the ranks of this host may use; none if the system does not tell.
std::optional<cpu_set_t> CoresOfHost(Communicator& comm) {
  const std::span<const int> hosts = comm.hosts();
  const auto rank = static_cast<std::size_t>(comm.rank());
  std::vector<cpu_set_t> sets(hosts.size());  // empty
  if (sched_getaffinity(0, sizeof(cpu_set_t), &sets[rank]) != 0) CPU_ZERO(&sets[rank]);
  FillIn<cpu_set_t>(comm, sets);
  cpu_set_t all = sets[rank];
  for (std::size_t r = 0; r < sets.size(); ++r) {
    if (hosts[r] == hosts[rank]) CPU_OR(&all, &all, &sets[r]);
  }
  if (CPU_COUNT(&all) == 0) return std::nullopt;
  return all;
}

// While it lives, this thread may run on all cores of `host_cores`; but not on its own if that is
// one: threads that begin there would stay for a while.
class OnHostCores {
 public:
  OnHostCores() {
    if (!host_cores || sched_getaffinity(0, sizeof(own_), &own_) != 0) return;
    cpu_set_t cores = *host_cores;
    if (CPU_COUNT(&own_) == 1 && CPU_COUNT(&cores) > 1) CPU_XOR(&cores, &cores, &own_);
    widened_ = sched_setaffinity(0, sizeof(cores), &cores) == 0;
  }
  ~OnHostCores() {
    if (widened_) sched_setaffinity(0, sizeof(own_), &own_);
  }
  OnHostCores(const OnHostCores&) = delete;
  OnHostCores& operator=(const OnHostCores&) = delete;

 private:
  cpu_set_t own_{};
  bool widened_ = false;
};

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

int HostCores() { return host_cores ? CPU_COUNT(&*host_cores) : DescribeMachine().cores; }

ThreadPool HostPool(int threads) {
  const OnHostCores scope;  // threads begin where their creator may run
  return ThreadPool(threads, std::chrono::microseconds(0));
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
  RunCollective(world->comm(), [] { host_cores = CoresOfHost(world->comm()); });
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
