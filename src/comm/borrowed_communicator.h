#pragma once

#include "treeline/comm.h"

namespace treeline {

// Hands everything on to a communicator that it borrows; to be derived from by one that does some
// of it in another way.
class BorrowedCommunicator : public Communicator {
 public:
  explicit BorrowedCommunicator(Communicator& comm) : comm_(comm) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::span<const int> hosts() const override { return comm_.hosts(); }
  std::chrono::milliseconds timeout() const override { return comm_.timeout(); }
  std::unique_ptr<Transfer> Start(const Message& message) override { return comm_.Start(message); }
  bool Progress() noexcept override { return comm_.Progress(); }
  void Abort(std::string_view why) noexcept override { comm_.Abort(why); }
  CommCounters counters() const override { return comm_.counters(); }
  void ResetCounters() override { comm_.ResetCounters(); }
  void SetStep(const char* step, std::uint64_t signature) override {
    comm_.SetStep(step, signature);
  }

 protected:
  Communicator& comm() const { return comm_; }

 private:
  Communicator& comm_;
};

}  // namespace treeline
