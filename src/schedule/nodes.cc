#include "schedule/nodes.h"

#include <algorithm>

#include "core/check.h"

namespace treeline {

Nodes::Nodes(const Communicator& comm, int node_size) {
  Require(node_size >= 0, "node_size is ", node_size, "; it must be positive, or 0 for hosts");
  for (int rank = 0; rank < comm.size(); ++rank) {
    const int node =
        node_size > 0 ? rank / node_size : comm.hosts()[static_cast<std::size_t>(rank)];
    if (node >= count()) members_.emplace_back();
    members_[static_cast<std::size_t>(node)].push_back(rank);
    node_.push_back(node);
  }
}

int Nodes::largest() const {
  std::size_t most = 0;
  for (const std::vector<int>& node : members_) most = std::max(most, node.size());
  return static_cast<int>(most);
}

const std::vector<int>& Nodes::With(int rank) const {
  return members_[static_cast<std::size_t>(node_[static_cast<std::size_t>(rank)])];
}

std::vector<int> Nodes::leaders() const {
  std::vector<int> first;
  for (const std::vector<int>& node : members_) first.push_back(node.front());
  return first;
}

}  // namespace treeline
