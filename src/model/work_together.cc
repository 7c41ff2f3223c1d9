#include "model/work_together.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <span>

#include "schedule/collective_call.h"
#include "schedule/collectives/collectives.h"
#include "treeline/errors.h"

namespace treeline::model {
namespace {

using std::chrono::milliseconds;

// How far ranks are, as they tell each other.
struct Report {
  static constexpr std::int32_t kNobody = std::numeric_limits<std::int32_t>::max();
  std::int32_t busy = 0;          // whether a rank still works
  std::int32_t failed = kNobody;  // the first rank with an error
  std::array<char, 1016> why{};   // what it says, as far as there is room
};

Report Agree(Communicator& comm, Report report) {
  Report scratch;
  const auto combine = [](Bytes mine, ConstBytes theirs) {
    Report a;
    Report b;
    std::memcpy(&a, mine.data(), sizeof(a));
    std::memcpy(&b, theirs.data(), sizeof(b));
    const std::int32_t busy = a.busy | b.busy;
    if (b.failed < a.failed) a = b;
    a.busy = busy;
    std::memcpy(mine.data(), &a, sizeof(a));
  };
  AllReduce(comm, std::as_writable_bytes(std::span(&report, 1)),
            std::as_writable_bytes(std::span(&scratch, 1)), combine);
  return report;
}

// What has come of a rank's work. Throws what is no FormatError.
Report ReportOf(std::future<void>& work, int rank) {
  Report report;
  try {
    work.get();
  } catch (const FormatError& error) {
    report.failed = rank;
    std::snprintf(report.why.data(), report.why.size(), "%s", error.what());
  }
  return report;
}

// Does each rank's work on a thread of its own, while the ranks tell each other that they are
// alive: a disk may take longer than the communicator waits. An error of one rank stops the others.
Report RunWork(Communicator& comm, const Work& work) {
  Report all;
  RunCollective(comm, [&] {
    const milliseconds beat = std::clamp(comm.timeout() / 4, milliseconds(1), milliseconds(200));
    Stop stop = false;
    std::future<void> own = std::async(std::launch::async, [&] { work(stop); });
    // The future waits for its thread when it is destroyed, which is after this.
    const std::unique_ptr<Stop, void (*)(Stop*)> leaving(&stop, [](Stop* flag) { *flag = true; });
    Report mine{.busy = 1};
    do {
      if (mine.busy != 0 && own.wait_for(beat) == std::future_status::ready) {
        mine = ReportOf(own, comm.rank());
      }
      all = Agree(comm, mine);
      if (all.failed != Report::kNobody) stop = true;
    } while (all.busy != 0);
  });
  return all;
}

}  // namespace

void WorkTogether(Communicator& comm, const Work& work, const std::function<void()>& undo) {
  const Report report = RunWork(comm, work);
  if (report.failed == Report::kNobody) return;
  // No rank may throw before all have undone their work and know why: the first that throws can end
  // the group, or the processes of the others.
  try {
    RunWork(comm, [&](const Stop&) {
      if (undo) undo();
    });
  } catch (const CommError&) {  // others have thrown by now
  }
  throw FormatError(report.why.data());
}

}  // namespace treeline::model
