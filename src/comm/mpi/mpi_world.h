#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "treeline/comm.h"

namespace treeline {

// What a launcher such as mpirun tells the processes that it starts, in their environment.
struct Launch {
  int ranks = 0;  // 0: this process was started by itself
  int rank = 0;
  int host_ranks = 1;  // on this host
};
// Throws ArgumentError if that makes no sense.
Launch FindLaunch();

using MpiSum = std::function<void(std::span<const float> values, std::span<float> sums)>;

// MPI, from its initialisation to its end, for a program whose ranks are its processes. A build
// without MPI has a stub of it, which throws.
class MpiWorld {
 public:
  struct Options {
    int threads_per_rank = 1;
    std::chrono::milliseconds timeout{60'000};
    std::string identity = {};  // what must be the same on all ranks
    // Called, on a thread of its own, if a call of MPI that knows no deadline lasts longer than the
    // timeout: its start and end, say. Must end the process.
    std::function<void(const char* what)> stuck = {};
  };

  // Throws CommError if this build has no MPI, or MPI cannot start; otherwise as
  // MakeMpiCommunicator.
  explicit MpiWorld(const Options& options);
  // Waits for the other ranks. Not to be called once one has failed: see End.
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  Communicator& comm() { return *comm_; }

  // The sum over all ranks by MPI_Allreduce, to compare times with. It knows no deadline, so
  // `stuck` is called if one is not followed by another, or by the result's end, in time.
  MpiSum SumByMpi() const;

  // Ends the processes of all ranks, which may hang, with an exit code. Ranks that have failed too
  // get a moment to say so.
  [[noreturn]] static void End(int exit_code) noexcept;

 private:
  const Options options_;
  std::unique_ptr<Communicator> comm_;
};

}  // namespace treeline
