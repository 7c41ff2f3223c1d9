#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "treeline/context.h"

namespace treeline {

// What a rank has sent since the counters were reset: payload only, nothing to itself.
struct CommCounters {
  std::int64_t bytes = 0;
  std::int64_t messages = 0;  // without empty ones
  // The longest chain of messages that ends at this rank, each sent after the one before it had
  // arrived at its sender.
  std::int64_t rounds = 0;
};

// A message on its way out, in, or both. Destroying it before Wait has returned withdraws it: its
// buffers are not touched from then on, and the communicator can no longer be used.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Returns when what was to come has arrived and what was to go may be overwritten. Throws
  // CommError if the peer does not come within the timeout, or any rank of the group has failed.
  virtual void Wait() = 0;
};

using ConstBytes = std::span<const std::byte>;
using Bytes = std::span<std::byte>;

inline constexpr int kNoRank = -1;

// What a rank sends and receives in one step. Either peer may be kNoRank if its side is empty, but
// not the rank itself. What is received must not overlap anything that is on its way.
struct Message {
  std::span<const ConstBytes> send = {};  // pieces, which arrive as one message
  int to = kNoRank;
  Bytes receive = {};
  int from = kNoRank;
};

// One rank's view of a group of ranks. Bytes only: no tensor types. Not thread-safe: each rank uses
// its own. Messages between two ranks arrive in the order in which they were started.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The host of every rank, numbered from 0 in the order of their first ranks.
  virtual std::span<const int> hosts() const = 0;
  // How long any wait lasts at most.
  virtual std::chrono::milliseconds timeout() const = 0;

  // Transfers to one rank, or from one, that may be on their way at a time.
  static constexpr int kMaxPending = 4;

  // Starts a transfer; never waits for a peer. The buffers, and the array of pieces, must live
  // until it is waited for or destroyed. Sizes must agree on both sides: if not, every rank gets a
  // CommError. Throws ArgumentError, and starts nothing, if a peer is no other rank of the group,
  // or the transfer that was started kMaxPending before this one, to the same rank or from the same
  // rank, has not been waited for. Throws CommError if a rank has failed.
  virtual std::unique_ptr<Transfer> Start(const Message& message) = 0;

  // Moves messages on where nobody else does while this rank computes. True if a rank has failed:
  // nothing that is computed now will be of use.
  virtual bool Progress() noexcept = 0;

  // Ends the group: every wait of every rank throws CommError with this rank and `why`. What the
  // first rank to fail says is kept.
  virtual void Abort(std::string_view why) noexcept = 0;

  virtual CommCounters counters() const = 0;
  virtual void ResetCounters() = 0;

  // Says what this rank is doing, for error messages. `step` must be a literal. Messages also carry
  // `signature`: both sides of a transfer must have the same, or every rank gets a CommError.
  virtual void SetStep(const char* step, std::uint64_t signature) = 0;

  // Start and Wait, with one piece. An empty side needs no peer.
  void Exchange(ConstBytes send, int to, Bytes receive, int from);
};

// To be put into the context of what is computed between Start and Wait.
inline Poll ProgressOf(Communicator& comm) {
  return {[](void* argument) { return static_cast<Communicator*>(argument)->Progress(); }, &comm};
}

struct ThreadRanks {
  int ranks = 1;
  std::chrono::milliseconds timeout{60'000};
  int threads_per_rank = 1;         // waits spin only while all threads have a core
  std::span<const int> hosts = {};  // to pretend, as in Communicator::hosts; empty: all share one
};

// Communicators between threads of this process. Bytes are copied from the sender's memory to the
// receiver's, once: by whichever of the two comes later, or by both if they are many.
class ThreadGroup {
 public:
  // Throws ArgumentError unless 1 <= ranks <= kMaxRanks, 0 < timeout <= kMaxTimeout,
  // threads_per_rank is positive, and hosts are numbered as they should be.
  explicit ThreadGroup(const ThreadRanks& options);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  static constexpr int kMaxRanks = 1024;
  static constexpr std::chrono::milliseconds kMaxTimeout = std::chrono::hours(24 * 365);

  // To be used by one thread at a time. Throws ArgumentError if there is no such rank.
  Communicator& rank(int rank);

  // The first rank that failed, or kNoRank.
  int failed_rank() const;

 private:
  class State;
  class Rank;
  std::unique_ptr<State> state_;
};

// Calls body(communicator of rank r) on a thread for every rank and returns when all have returned.
// A rank that throws ends the others with a CommError; what the first one threw is thrown again. If
// the first rank to fail caught that itself, what another rank threw is, if any did.
void RunRanks(const ThreadRanks& options, const std::function<void(Communicator&)>& body);

}  // namespace treeline
