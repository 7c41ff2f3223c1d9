#include "cli/measure_overlap.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "cli/limits.h"
#include "cli/ranks.h"
#include "comm/borrowed_communicator.h"

namespace treeline::cli {
namespace {

// Every transfer has ended when Start returns.
class SerialCommunicator final : public BorrowedCommunicator {
 public:
  using BorrowedCommunicator::BorrowedCommunicator;

  double seconds() const { return seconds_; }  // of all transfers

  std::unique_ptr<Transfer> Start(const Message& message) override {
    seconds_ += TimeOnce([&] { comm().Start(message)->Wait(); });
    return std::make_unique<Ended>();
  }

 private:
  class Ended final : public Transfer {
   public:
    void Wait() override {}
  };

  double seconds_ = 0.0;
};

}  // namespace

Overlap MeasureOverlap(Communicator& comm, int repeats,
                       const std::function<void(Communicator&)>& step) {
  std::vector<double> serial;
  std::vector<double> network;
  std::vector<double> hidden;
  for (std::size_t i = 0; i < static_cast<std::size_t>(repeats); ++i) {
    const double overlapped = TimeStep(comm, [&] { step(comm); });
    SerialCommunicator one_by_one(comm);
    serial.push_back(TimeStep(comm, [&] { step(one_by_one); }));
    network.push_back(one_by_one.seconds());
    const double shorter = std::min(network[i], serial[i] - network[i]);
    hidden.push_back((serial[i] - overlapped) / shorter);
  }
  return {Median(serial), Median(network), Median(hidden)};
}

}  // namespace treeline::cli
