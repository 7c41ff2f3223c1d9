#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "comm/borrowed_communicator.h"

namespace treeline::test {

struct Disturbance {
  unsigned seed = 0;
  int delay_percent = 0;            // of the calls of Start and Wait; most delays are a yield
  int fail_at = -1;                 // the call of Start or Wait, from 0, that calls `fail` instead
  std::function<void()> fail = {};  // throws
};

// Hands everything on to a communicator that it borrows, with random delays before and after, and
// fails where it is told to. A message with two sides may become two transfers, in either order,
// with a delay between.
class DisturbedCommunicator final : public BorrowedCommunicator {
 public:
  DisturbedCommunicator(Communicator& comm, Disturbance disturbance)
      : BorrowedCommunicator(comm),
        disturbance_(std::move(disturbance)),
        random_(disturbance_.seed * 1024 + static_cast<unsigned>(comm.rank()) + 1) {}

  std::unique_ptr<Transfer> Start(const Message& message) override {
    CountCall();
    auto halves = std::make_unique<Halves>(*this);
    if (Percent(disturbance_.delay_percent)) {
      std::vector<Message> messages{{.receive = message.receive, .from = message.from},
                                    {.send = message.send, .to = message.to}};
      if (Percent(50)) std::swap(messages[0], messages[1]);
      for (const Message& half : messages) {
        halves->Add(comm().Start(half));
        Delay();
      }
    } else {
      halves->Add(comm().Start(message));
    }
    return halves;
  }

  // Calls of Start and Wait so far.
  int calls() const { return calls_; }

 private:
  class Halves final : public Transfer {
   public:
    explicit Halves(DisturbedCommunicator& comm) : comm_(comm) {}

    void Add(std::unique_ptr<Transfer> half) { halves_.push_back(std::move(half)); }

    void Wait() override {
      comm_.CountCall();
      if (comm_.Percent(50)) std::reverse(halves_.begin(), halves_.end());
      for (const auto& half : halves_) {
        half->Wait();
        comm_.Delay();
      }
    }

   private:
    DisturbedCommunicator& comm_;
    std::vector<std::unique_ptr<Transfer>> halves_;
  };

  void CountCall() {
    if (calls_++ == disturbance_.fail_at) disturbance_.fail();
    Delay();
  }

  bool Percent(int percent) { return static_cast<int>(random_() % 100) < percent; }

  void Delay() {
    if (!Percent(disturbance_.delay_percent)) return;
    if (Percent(80)) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 50));
  }

  const Disturbance disturbance_;
  std::minstd_rand random_;
  int calls_ = 0;
};

}  // namespace treeline::test
