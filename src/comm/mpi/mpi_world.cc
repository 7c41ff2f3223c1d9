#include "comm/mpi/mpi_world.h"

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"
#include "treeline/mpi.h"

namespace treeline {
namespace {

constexpr std::chrono::milliseconds kGrace{500};  // for the better message of a communicator
constexpr std::chrono::milliseconds kLastWords{500};

// Open MPI reads these when it starts; what the user has set stays.
void SetDefaults(int threads_per_rank) {
  // Over one connection, large messages that cross each other take turns.
  setenv("OMPI_MCA_btl_tcp_links", "2", /*overwrite=*/0);
  // Ranks that have no core of their own must give way while they wait.
  const auto threads =
      static_cast<unsigned>(FindLaunch().host_ranks) * static_cast<unsigned>(threads_per_rank);
  if (threads > std::thread::hardware_concurrency()) {
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  }
}

// Calls `bark` if it lives longer than it should, or longer than that after it was fed.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds patience, std::function<void()> bark)
      : thread_([this, patience, bark = std::move(bark)] {
          std::unique_lock lock(mutex_);
          int meals = 0;
          do {
            meals = meals_;
            if (ended_.wait_for(lock, patience, [&] { return done_; })) return;
          } while (meals != meals_);
          bark();
        }) {}

  void Feed() { ++meals_; }

  ~Watchdog() {
    {
      const std::scoped_lock lock(mutex_);
      done_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }

 private:
  std::atomic<int> meals_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace

MpiWorld::MpiWorld(const Options& options) : options_(options) {
  SetDefaults(options.threads_per_rank);
  const Watchdog watchdog(options_.timeout + kGrace, [this] { options_.stuck("start"); });
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) {
    Throw<CommError>("MPI_Init_thread failed");
  }
  if (provided < MPI_THREAD_FUNNELED) {
    Throw<CommError>("this MPI cannot be used by a process with threads");
  }
  comm_ = MakeMpiCommunicator(MPI_COMM_WORLD,
                              {.timeout = options.timeout, .identity = options.identity});
}

MpiWorld::~MpiWorld() {
  const Watchdog watchdog(options_.timeout + kGrace, [this] { options_.stuck("end"); });
  comm_.reset();
  MPI_Finalize();
}

MpiSum MpiWorld::SumByMpi() const {
  auto watchdog =
      std::make_shared<Watchdog>(options_.timeout, [this] { options_.stuck("mpi-sum"); });
  return [watchdog](std::span<const float> values, std::span<float> sums) {
    Require(values.size() == sums.size() && values.size() <= std::numeric_limits<int>::max(),
            "cannot sum ", values.size(), " values to ", sums.size());
    watchdog->Feed();
    // Open MPI ends the program if this fails.
    MPI_Allreduce(values.data(), sums.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  };
}

void MpiWorld::End(int exit_code) noexcept {
  std::fflush(nullptr);
  std::this_thread::sleep_for(kLastWords);
  // Not by MPI_Abort, which a dead link can keep from returning: mpirun ends a job that a process
  // has left with an error, and passes its code on.
  std::_Exit(exit_code);
}

}  // namespace treeline
