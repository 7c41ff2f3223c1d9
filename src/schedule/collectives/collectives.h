#pragma once

#include <functional>
#include <span>
#include <vector>

#include "treeline/comm.h"

namespace treeline {

// Written once over point-to-point messages, so that order, bytes and bits are the same on every
// transport. All ranks call each with the same sizes. N ranks, k = floor(log2 N), n bytes a value.

// mine := mine (+) theirs. Must be bitwise commutative: then the partners of an exchange, and so
// all ranks, end with the same bits.
using Combine = std::function<void(Bytes mine, ConstBytes theirs)>;

// value := combination of all ranks' values, by recursive doubling with distances 2^(k-1), …, 1.
// `scratch` is as large as the value. If N = 2^k: k rounds, k * n bytes sent by each rank.
// Otherwise the last N - 2^k ranks fold into the first ones and get the result back: they send n,
// their partners (k + 1) * n, the others k * n. That is k + 2 rounds if N > 1.5 * 2^k; for fewer
// ranks no chain of messages starts and ends at a folded rank's partner, and there are k + 1.
void AllReduce(Communicator& comm, Bytes value, Bytes scratch, const Combine& combine);

// What a rank sends to one other; it arrives as one message.
using Pieces = std::vector<ConstBytes>;

// send[r] goes to rank r, and receive[r] comes from rank r, in one round. Entries of the own rank
// are ignored. Empty ones are waited for, so that ranks which disagree about them find out.
void AllToAll(Communicator& comm, std::span<const Pieces> send, std::span<const Bytes> receive);

// The same to all: `mine` goes to every other rank, receive[r] comes from rank r. One round.
void AllGather(Communicator& comm, const Pieces& mine, std::span<const Bytes> receive);

// receive[r] on `root` comes from rank r's `mine`. One round.
void GatherTo(Communicator& comm, int root, ConstBytes mine, std::span<const Bytes> receive);

// `value` of `root` to all. One round.
void Broadcast(Communicator& comm, int root, Bytes value);

// Returns when all ranks have called it. ceil(log2 N) rounds of a byte.
void Barrier(Communicator& comm);

}  // namespace treeline
