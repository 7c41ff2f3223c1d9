#include "schedule/collectives/collectives.h"

#include <bit>

namespace treeline {
namespace {

using Transfers = std::vector<std::unique_ptr<Transfer>>;

void WaitAll(Transfers& transfers) {
  for (auto& transfer : transfers) transfer->Wait();
}

std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

}  // namespace

void AllReduce(Communicator& comm, Bytes value, Bytes scratch, const Combine& combine) {
  const int rank = comm.rank();
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(comm.size())));
  const int folded = comm.size() - core;  // ranks beyond the largest power of two
  if (rank >= core) {
    comm.Exchange(value, rank - core, {}, kNoRank);
    comm.Exchange({}, kNoRank, value, rank - core);
    return;
  }
  if (rank < folded) {
    comm.Exchange({}, kNoRank, scratch, rank + core);
    combine(value, scratch);
  }
  for (int distance = core / 2; distance > 0; distance /= 2) {
    const int partner = rank ^ distance;
    comm.Exchange(value, partner, scratch, partner);
    combine(value, scratch);
  }
  if (rank < folded) comm.Exchange(value, rank + core, {}, kNoRank);
}

void AllToAll(Communicator& comm, std::span<const Pieces> send, std::span<const Bytes> receive) {
  Transfers transfers;
  // Each rank starts with its right neighbour, so that not all turn to the same rank at once.
  for (int step = 1; step < comm.size(); ++step) {
    const int to = (comm.rank() + step) % comm.size();
    const int from = (comm.rank() + comm.size() - step) % comm.size();
    transfers.push_back(comm.Start(
        {.send = send[Index(to)], .to = to, .receive = receive[Index(from)], .from = from}));
  }
  WaitAll(transfers);
}

void AllGather(Communicator& comm, const Pieces& mine, std::span<const Bytes> receive) {
  Transfers transfers;
  for (int step = 1; step < comm.size(); ++step) {
    const int to = (comm.rank() + step) % comm.size();
    const int from = (comm.rank() + comm.size() - step) % comm.size();
    transfers.push_back(
        comm.Start({.send = mine, .to = to, .receive = receive[Index(from)], .from = from}));
  }
  WaitAll(transfers);
}

void GatherTo(Communicator& comm, int root, ConstBytes mine, std::span<const Bytes> receive) {
  if (comm.rank() != root) {
    comm.Exchange(mine, root, {}, kNoRank);
    return;
  }
  Transfers transfers;
  for (int from = 0; from < comm.size(); ++from) {
    if (from == root) continue;
    transfers.push_back(comm.Start({.receive = receive[Index(from)], .from = from}));
  }
  WaitAll(transfers);
}

void Broadcast(Communicator& comm, int root, Bytes value) {
  if (comm.rank() != root) {
    comm.Exchange({}, kNoRank, value, root);
    return;
  }
  Transfers transfers;
  const ConstBytes piece = value;
  for (int to = 0; to < comm.size(); ++to) {
    if (to != root) transfers.push_back(comm.Start({.send = {&piece, 1}, .to = to}));
  }
  WaitAll(transfers);
}

void Barrier(Communicator& comm) {
  std::byte out{0};
  std::byte in{0};
  for (int distance = 1; distance < comm.size(); distance *= 2) {
    const int to = (comm.rank() + distance) % comm.size();
    const int from = (comm.rank() + comm.size() - distance) % comm.size();
    comm.Exchange({&out, 1}, to, {&in, 1}, from);
  }
}

}  // namespace treeline
