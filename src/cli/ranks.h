#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "comm/mpi/mpi_world.h"
#include "treeline/comm.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {

// Where the ranks of a command are: threads of this process, or the processes that mpirun has
// started. Every process runs the whole command; only rank 0 prints.

// The rank of this process, and whether it may print and write files. Known from the start.
int ProcessRank() noexcept;
bool IsFirst() noexcept;

// `--comm` and `--timeout`, the same in every command over ranks.
struct RankOptions {
  std::string comm;  // "", "threads" or "mpi"
  double timeout = 60.0;

  std::chrono::milliseconds milliseconds() const {
    return std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1e3));
  }
};
void AddRankOptions(CLI::App& command, RankOptions& options);
void AddTimeoutOption(CLI::App& command, RankOptions& options);

// Joins the other processes if there are any, and returns the numbers of ranks to run with: those
// that were asked for, or the number of processes. Throws ArgumentError if they contradict.
std::vector<int> JoinRanks(const RankOptions& options, const std::vector<int>& asked,
                           const std::vector<int>& otherwise, int threads_per_rank);

// The process's communicator, or null: ranks are threads.
Communicator* Processes();

// Of so many ranks, those on this host.
int RanksHere(int ranks);

// Cores that the ranks of this host may use together: mpirun may give each process its own. A pool
// on them measures what the host can do; its threads do not spin, since ranks need their cores.
int HostCores();
ThreadPool HostPool(int threads);

// See MpiWorld. Only where ranks are processes.
MpiSum SumByMpi();

// Calls body(communicator) on every rank: on all of them here, or on this process's.
void RunOverRanks(const ThreadRanks& options, const std::function<void(Communicator&)>& body);

// The time of step() on all ranks, from when all begin until all have ended, as a rank sees it.
double TimeStep(Communicator& comm, const std::function<void()>& step);

// `whole` in elements of the size of `unwritten`; for FillIn.
void FillInBytes(Communicator& comm, Bytes whole, ConstBytes unwritten);

// Every rank has written its part of `whole`, which is `unwritten` elsewhere; afterwards every rank
// has all of it. Does nothing where ranks share memory.
template <class T>
void FillIn(Communicator& comm, std::span<T> whole, const T& unwritten = {}) {
  FillInBytes(comm, std::as_writable_bytes(whole), std::as_bytes(std::span(&unwritten, 1)));
}

// To be called when a command has ended well, and instead when it has failed.
void LeaveRanks();
[[noreturn]] void EndRanks(int exit_code) noexcept;

}  // namespace treeline::cli
