#include "comm/subgroup.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"

namespace treeline {

Subgroup::Subgroup(Communicator& parent, std::vector<int> members)
    : BorrowedCommunicator(parent), members_(std::move(members)) {
  const auto self = std::find(members_.begin(), members_.end(), parent.rank());
  Require(self != members_.end(), "rank ", parent.rank(), " is not in its own group");
  rank_ = static_cast<int>(self - members_.begin());
  std::map<int, int> numbers;  // of the parent's hosts, here
  for (const int member : members_) {
    const int host = parent.hosts()[static_cast<std::size_t>(member)];
    hosts_.push_back(numbers.emplace(host, static_cast<int>(numbers.size())).first->second);
  }
}

std::unique_ptr<Transfer> Subgroup::Start(const Message& message) {
  Message mapped = message;
  mapped.to = ToParent(message.to);
  mapped.from = ToParent(message.from);
  return comm().Start(mapped);
}

int Subgroup::ToParent(int rank) const {
  if (rank == kNoRank) return kNoRank;
  Require(rank >= 0 && rank < size(), "a group of ", size(), " has no rank ", rank);
  return members_[static_cast<std::size_t>(rank)];
}

}  // namespace treeline
