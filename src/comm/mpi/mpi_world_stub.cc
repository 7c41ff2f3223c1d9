// For builds without MPI.

#include <cstdlib>

#include "comm/mpi/mpi_world.h"
#include "core/check.h"

namespace treeline {

MpiWorld::MpiWorld(const Options& options) : options_(options) {
  Throw<CommError>("this build of treeline has no MPI; build it where Open MPI is installed");
}

MpiWorld::~MpiWorld() = default;

MpiSum MpiWorld::SumByMpi() const { return {}; }

void MpiWorld::End(int exit_code) noexcept { std::_Exit(exit_code); }

}  // namespace treeline
