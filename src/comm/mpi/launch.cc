#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "comm/mpi/mpi_world.h"

namespace treeline {
namespace {

// A number from the environment, or -1.
int Variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return -1;
  int value = -1;
  const char* end = text + std::strlen(text);
  const auto [last, error] = std::from_chars(text, end, value);
  return error == std::errc() && last == end ? value : -1;
}

}  // namespace

Launch FindLaunch() {
  const int ranks = Variable("OMPI_COMM_WORLD_SIZE");
  const int rank = Variable("OMPI_COMM_WORLD_RANK");
  if (ranks < 1 || rank < 0 || rank >= ranks) return {};
  return {.ranks = ranks,
          .rank = rank,
          .host_ranks = std::max(Variable("OMPI_COMM_WORLD_LOCAL_SIZE"), 1)};
}

}  // namespace treeline
