#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "treeline/backend.h"
#include "treeline/comm.h"

namespace treeline {

// A rank's keys and values of one sequence, and where those of the other ranks belong.
struct KvShard {
  KvView kv;
  std::span<const Positions> shards;  // [ranks]
};

// The keys and values of all sequences that one rank holds.
struct KvBlock {
  int owner = 0;
  std::vector<KvView> views = {};         // [sequence]
  std::vector<Positions> positions = {};  // [sequence]
};

// Sends each rank's block round the ring, so that every rank sees every block: its own first, then
// those of the ranks before it. Step t sends what came in step t - 1: N - 1 rounds; a rank sends
// all blocks but that of its right neighbour. The own block is sent from where it lies if it is
// dense, and packed into a receive buffer that is still free otherwise. It is also read from there:
// kernels read other strides in another order, and all ranks must get the same bits of a block.
// Besides the own block there are two receive buffers, or one for two ranks; two if it is packed.
class KvRing {
 public:
  // Borrows all arguments.
  KvRing(Communicator& comm, Backend& backend, const AttentionSpec& spec,
         std::span<const KvShard> shards);

  // Calls visit(block) for every rank's block, the next one on its way meanwhile.
  void Run(const std::function<void(const KvBlock&)>& visit);

 private:
  std::size_t BlockBytes(int owner) const;
  KvBlock OwnBlock() const;
  // The views of a block that lies packed at `bytes`: K, then V, of each sequence in `order_`.
  KvBlock BlockAt(std::byte* bytes, int owner) const;
  bool IsDense() const;
  std::vector<ConstBytes> DensePieces() const;
  void Pack(std::byte* target) const;

  Communicator& comm_;
  Backend& backend_;
  const AttentionSpec& spec_;
  const std::span<const KvShard> shards_;
  // Sequences as they follow each other in a block: those that need most alignment first, because
  // q8_0 rows end at any even byte. Types are the same on all ranks, and so is this.
  std::vector<std::size_t> order_;
};

}  // namespace treeline
