#pragma once

#include <vector>

#include "treeline/comm.h"

namespace treeline {

// Ranks in nodes, within which messages are cheap.
class Nodes {
 public:
  // Nodes of `node_size` neighbouring ranks, or, if that is 0, the communicator's hosts. Throws
  // ArgumentError if it is negative.
  Nodes(const Communicator& comm, int node_size);

  int count() const { return static_cast<int>(members_.size()); }
  int largest() const;
  // The ranks of the node that holds `rank`; the first one leads it.
  const std::vector<int>& With(int rank) const;
  // The first rank of every node.
  std::vector<int> leaders() const;

 private:
  std::vector<std::vector<int>> members_;  // [node]
  std::vector<int> node_;                  // [rank]
};

}  // namespace treeline
