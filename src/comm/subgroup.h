#pragma once

#include <vector>

#include "comm/borrowed_communicator.h"

namespace treeline {

// Some ranks of a communicator, as a communicator of their own. It borrows the parent, whose
// counters, deadline and errors it shares.
class Subgroup final : public BorrowedCommunicator {
 public:
  // `members` are ranks of the parent, the same list on all of them, with the caller among them.
  Subgroup(Communicator& parent, std::vector<int> members);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::span<const int> hosts() const override { return hosts_; }
  std::unique_ptr<Transfer> Start(const Message& message) override;

 private:
  int ToParent(int rank) const;

  const std::vector<int> members_;
  std::vector<int> hosts_;
  int rank_ = kNoRank;
};

}  // namespace treeline
