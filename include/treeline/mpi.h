#pragma once

// Ranks that are processes of an MPI program. Only in a library that was built with MPI.

#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>

#include "treeline/comm.h"

namespace treeline {

struct MpiOptions {
  std::chrono::milliseconds timeout{60'000};
  // What else must be the same on all ranks: a model, say, or the arguments of a program.
  std::string identity = {};
};

// The ranks of `comm`, of which private duplicates are made: messages of the caller's own do not
// mix with those of schedules. MPI must have been initialised, with MPI_THREAD_FUNNELED or more if
// ranks compute with several threads; the thread that calls this makes all calls. To be destroyed
// before MPI_Finalize, on all ranks.
//
// Collective. Throws ArgumentError if the timeout is not in (0, one year], `comm` is MPI_COMM_NULL,
// or MPI has not been initialised or has been finalised; and CommError if a rank does not come in
// time, or if versions, instruction sets or identities differ between ranks.
//
// After a CommError MPI may still hold buffers of messages that were on their way: it cannot take
// them back. Make no more calls of MPI then, and end the process by std::_Exit: mpirun ends the
// others.
std::unique_ptr<Communicator> MakeMpiCommunicator(MPI_Comm comm, const MpiOptions& options = {});

}  // namespace treeline
