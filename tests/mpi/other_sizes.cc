// Rank 0 expects another size than rank 1 sends: all ranks must learn of it at once, long before
// the deadline. Sizes are those of messages that are packed behind their header, and of larger
// ones.
//
// usage: other_sizes BYTES_SENT BYTES_EXPECTED, under mpirun

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cli/ranks.h"
#include "treeline/errors.h"

namespace treeline::cli {
namespace {

void Run(std::size_t sent, std::size_t expected) {
  JoinRanks({.comm = "mpi", .timeout = 600}, {}, {}, 1);
  Communicator& comm = *Processes();
  std::vector<std::byte> bytes(std::max(sent, expected));
  try {
    if (comm.rank() == 0) comm.Exchange({}, kNoRank, {bytes.data(), expected}, 1);
    if (comm.rank() == 1) comm.Exchange({bytes.data(), sent}, 0, {}, kNoRank);
    std::byte none{};
    comm.Exchange({}, kNoRank, {&none, 1}, comm.rank() == 0 ? 1 : 0);  // that nobody sends
  } catch (const CommError& error) {
    std::printf("rank %d: %s\n", comm.rank(), error.what());
  }
  EndRanks(kCommunication);
}

}  // namespace
}  // namespace treeline::cli

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  treeline::cli::Run(std::strtoull(argv[1], nullptr, 10), std::strtoull(argv[2], nullptr, 10));
}
