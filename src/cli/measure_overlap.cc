#include "cli/measure_overlap.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#include "cli/limits.h"
#include "cli/ranks.h"

namespace treeline::cli {
namespace {

// Every transfer has ended when Start returns.
class SerialCommunicator final : public Communicator {
 public:
  explicit SerialCommunicator(Communicator& comm) : comm_(comm) {}

  double seconds() const { return seconds_; }  // of all transfers

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::span<const int> hosts() const override { return comm_.hosts(); }
  std::chrono::milliseconds timeout() const override { return comm_.timeout(); }
  std::unique_ptr<Transfer> Start(const Message& message) override {
    seconds_ += TimeOnce([&] { comm_.Start(message)->Wait(); });
    return std::make_unique<Ended>();
  }
  bool Progress() noexcept override { return comm_.Progress(); }
  void Abort(std::string_view why) noexcept override { comm_.Abort(why); }
  CommCounters counters() const override { return comm_.counters(); }
  void ResetCounters() override { comm_.ResetCounters(); }
  void SetStep(const char* step, std::uint64_t signature) override {
    comm_.SetStep(step, signature);
  }

 private:
  class Ended final : public Transfer {
   public:
    void Wait() override {}
  };

  Communicator& comm_;
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
