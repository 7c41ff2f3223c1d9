#include <charconv>
#include <cstdlib>
#include <cstring>

#include "comm/mpi/mpi_world.h"
#include "core/check.h"

namespace treeline {
namespace {

// What launchers call these: Open MPI's mpirun, and those that speak PMI.
struct Names {
  const char* ranks;
  const char* rank;
  const char* host_ranks;
};
constexpr Names kLaunchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"}};

// A number from the environment, at least `least` and below `end`.
int Variable(const char* name, int least, int end) {
  const char* text = std::getenv(name);
  int value = -1;
  if (text != nullptr) {
    const char* last = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, last, value);
    if (error != std::errc() || stop != last) value = -1;
  }
  Require(value >= least && value < end, "the environment variable ", name, " is '",
          text == nullptr ? "" : text, "'; mpirun sets it to a number from ", least, " to ",
          end - 1);
  return value;
}

}  // namespace

Launch FindLaunch() {
  constexpr int kMost = 1 << 24;
  for (const Names& names : kLaunchers) {
    if (std::getenv(names.ranks) == nullptr) continue;
    const int ranks = Variable(names.ranks, 1, kMost);
    const bool local = std::getenv(names.host_ranks) != nullptr;
    return {.ranks = ranks,
            .rank = Variable(names.rank, 0, ranks),
            .host_ranks = local ? Variable(names.host_ranks, 1, ranks + 1) : 1};
  }
  return {};
}

}  // namespace treeline
