// For builds without MPI.

#include <cstdlib>

#include "comm/mpi/mpi_world.h"
#include "core/check.h"

namespace treeline {

bool MpiWorld::IsBuiltIn() { return false; }

MpiWorld::MpiWorld(const Options& options) : options_(options) {
  Throw<CommError>("this build of treeline has no MPI; build it where Open MPI is installed");
}

MpiWorld::~MpiWorld() = default;

void MpiWorld::SumByMpi(std::span<const float>, std::span<float>) {}

void MpiWorld::End(int exit_code) noexcept { std::_Exit(exit_code); }

}  // namespace treeline
