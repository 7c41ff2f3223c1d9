#pragma once

#include <vector>

#include "treeline/comm.h"

namespace treeline {

// Some ranks of a communicator, as a communicator of their own. It borrows the parent, whose
// counters, deadline and errors it shares.
class Subgroup final : public Communicator {
 public:
  // `members` are ranks of the parent, the same list on all of them, with the caller among them.
  Subgroup(Communicator& parent, std::vector<int> members);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::span<const int> hosts() const override { return hosts_; }
  std::chrono::milliseconds timeout() const override { return parent_.timeout(); }
  std::unique_ptr<Transfer> Start(const Message& message) override;
  bool Progress() noexcept override { return parent_.Progress(); }
  void Abort(std::string_view why) noexcept override { parent_.Abort(why); }
  CommCounters counters() const override { return parent_.counters(); }
  void ResetCounters() override { parent_.ResetCounters(); }
  void SetStep(const char* step, std::uint64_t signature) override {
    parent_.SetStep(step, signature);
  }

 private:
  int ToParent(int rank) const;

  Communicator& parent_;
  const std::vector<int> members_;
  std::vector<int> hosts_;
  int rank_ = kNoRank;
};

}  // namespace treeline
