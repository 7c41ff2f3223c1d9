#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "treeline/comm.h"
#include "treeline/errors.h"

namespace treeline::test {

using namespace std::chrono_literals;

// Far beyond what any of these tests takes, on a loaded machine and with sanitizers: waits that
// last this long were not ended by what should have ended them.
inline constexpr std::chrono::milliseconds kLong = 100s;
inline constexpr std::chrono::seconds kAtOnce{30};

// What became of one rank.
struct RankOutcome {
  enum class Kind { kReturned, kCommError, kArgumentError, kOther };
  Kind kind = Kind::kReturned;
  std::string what;
  std::chrono::steady_clock::duration after{};
};

struct Outcomes {
  std::vector<RankOutcome> ranks;
  std::exception_ptr thrown;  // by RunRanks

  const RankOutcome& operator[](int rank) const { return ranks[static_cast<std::size_t>(rank)]; }
};

// RunRanks, with a record of what every rank threw.
inline Outcomes RunAndRecord(const ThreadRanks& options,
                             const std::function<void(Communicator&)>& body) {
  using Kind = RankOutcome::Kind;
  Outcomes outcomes;
  outcomes.ranks.resize(static_cast<std::size_t>(options.ranks));
  const auto start = std::chrono::steady_clock::now();
  try {
    RunRanks(options, [&](Communicator& comm) {
      RankOutcome& mine = outcomes.ranks[static_cast<std::size_t>(comm.rank())];
      const auto record = [&](Kind kind, const char* what) {
        mine = {kind, what, std::chrono::steady_clock::now() - start};
      };
      try {
        body(comm);
        record(Kind::kReturned, "");
      } catch (const CommError& error) {
        record(Kind::kCommError, error.what());
        throw;
      } catch (const ArgumentError& error) {
        record(Kind::kArgumentError, error.what());
        throw;
      } catch (...) {
        record(Kind::kOther, "");
        throw;
      }
    });
  } catch (...) {
    outcomes.thrown = std::current_exception();
  }
  return outcomes;
}

// What RunRanks threw is an E, and no class derived from it.
template <class E>
void ExpectThrown(const Outcomes& outcomes, const std::string& what) {
  ASSERT_TRUE(outcomes.thrown) << "RunRanks threw nothing";
  try {
    std::rethrow_exception(outcomes.thrown);
  } catch (const std::exception& error) {
    EXPECT_EQ(typeid(error), typeid(E));
    EXPECT_EQ(error.what(), what);
  } catch (...) {
    ADD_FAILURE() << "RunRanks threw no std::exception";
  }
}

// Byte i of message `index` from one rank to another.
inline std::byte PayloadByte(int from, int to, int index, std::size_t i) {
  return static_cast<std::byte>(static_cast<std::size_t>(from * 131 + to * 71 + index * 29) +
                                i * 7 + (i >> 8));
}

inline std::vector<std::byte> Payload(int from, int to, int index, std::size_t bytes) {
  std::vector<std::byte> payload(bytes);
  for (std::size_t i = 0; i < bytes; ++i) payload[i] = PayloadByte(from, to, index, i);
  return payload;
}

// What a buffer holds that nobody has written to.
inline constexpr std::byte kUntouched{0xA5};

// Memory to receive into, with a margin behind that must stay as it is.
class Inbox {
 public:
  explicit Inbox(std::size_t bytes) : memory_(bytes + kMargin, kUntouched) {}

  Bytes bytes() { return Bytes(memory_).first(memory_.size() - kMargin); }

  bool Holds(const std::vector<std::byte>& payload) const {
    std::vector<std::byte> expected = payload;
    expected.resize(payload.size() + kMargin, kUntouched);
    return memory_ == expected;
  }
  bool Untouched() const { return memory_ == std::vector<std::byte>(memory_.size(), kUntouched); }

 private:
  static constexpr std::size_t kMargin = 16;
  std::vector<std::byte> memory_;
};

// A group made after whatever happened before works: two messages from every rank to the next.
inline void ExpectNewGroupWorks(int ranks) {
  RunRanks({.ranks = ranks, .timeout = kLong}, [](Communicator& comm) {
    const int n = comm.size();
    if (n == 1) return;
    const int to = (comm.rank() + 1) % n;
    const int from = (comm.rank() + n - 1) % n;
    for (int index = 0; index < 2; ++index) {
      Inbox in(100);
      comm.Exchange(Payload(comm.rank(), to, index, 100), to, in.bytes(), from);
      EXPECT_TRUE(in.Holds(Payload(from, comm.rank(), index, 100)));
    }
  });
}

}  // namespace treeline::test
