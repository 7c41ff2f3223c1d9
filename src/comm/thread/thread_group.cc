// Ranks as threads of one process.
//
// Between every two ranks there is a channel in each direction: a short ring of slots, one a
// message. The sender and the receiver both enter where their bytes are; whoever comes second
// copies them straight from one to the other and marks the slot as moved. A large message is only
// marked as matched then: both ranks copy chunks of it while they wait, or one alone if the other
// still computes. So there is one copy, no buffer in between, and no waiting for a partner that has
// not come yet. A slot's state is one atomic word: nobody takes a lock.
//
// A slot is always free when its turn comes: a rank that starts message m has waited for message
// m - kMaxPending, which its peer therefore has started, and so waited for m - 2 * kMaxPending.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/channel_end.h"
#include "comm/thread/event.h"
#include "core/check.h"
#include "treeline/comm.h"
#include "treeline/thread_pool.h"

namespace treeline {
namespace {

// Messages of more bytes are copied in chunks of so many, by both ranks.
constexpr std::size_t kChunk = std::size_t{1} << 18;

// Bits of a slot's state.
enum : std::uint32_t {
  kSent = 1,        // the sender's fields are set
  kReady = 2,       // the receiver's are
  kMatched = 4,     // either side may copy chunks of a large message
  kMoved = 8,       // the bytes have been copied
  kRejected = 16,   // the two sides do not match
  kWithdrawn = 32,  // one side has given up; the slot is never used again
  kSenderDone = 64,
  kReceiverDone = 128,
};

// What one side of a message enters.
struct Side {
  std::size_t bytes = 0;
  std::uint64_t signature = 0;
  const char* step = "";
};

struct alignas(64) Slot {
  std::atomic<std::uint32_t> state{0};
  // A large message's bytes, once matched; its chunks that somebody copies or has copied; and those
  // that are copied.
  std::size_t bytes = 0;
  std::atomic<std::size_t> claimed{0};
  std::atomic<std::size_t> copied{0};
  std::int64_t depth = 0;  // rounds that led to this message
  // Borrowed from the transfers of both sides until the bytes have been moved.
  const Side* sender = nullptr;
  std::span<const ConstBytes> pieces;
  const Side* receiver = nullptr;
  std::byte* target = nullptr;

  std::size_t chunks() const { return (bytes + kChunk - 1) / kChunk; }
};

// Copies bytes [begin, end) of a message.
void CopyBytes(const Slot& slot, std::size_t begin, std::size_t end) {
  std::size_t first = 0;  // of the piece
  for (const ConstBytes& piece : slot.pieces) {
    const std::size_t from = std::max(begin, first);
    const std::size_t to = std::min(end, first + piece.size());
    if (from < to) std::memcpy(slot.target + from, piece.data() + (from - first), to - from);
    first += piece.size();
  }
}

// Messages from one rank to another, in order. Each end is its rank's alone.
struct Channel {
  std::array<Slot, ChannelEnd::kPlaces> slots;
  alignas(64) ChannelEnd sender;
  alignas(64) ChannelEnd receiver;
};

// Throws ArgumentError unless hosts are numbered from 0 in the order of their first ranks.
void RequireHosts(const ThreadRanks& options) {
  if (options.hosts.empty()) return;
  Require(options.hosts.size() == static_cast<std::size_t>(options.ranks), "hosts has ",
          options.hosts.size(), " entries; there are ", options.ranks, " ranks");
  int next = 0;
  for (const int host : options.hosts) {
    Require(host >= 0 && host <= next, "hosts has a ", host, " where at most ", next,
            " can follow; they must be numbered in the order of their first ranks");
    next = std::max(next, host + 1);
  }
}

}  // namespace

class ThreadGroup::State {
 public:
  explicit State(const ThreadRanks& options);

  int size() const { return size_; }
  std::span<const int> hosts() const { return hosts_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  std::chrono::microseconds spin() const { return spin_; }
  Channel& channel(int from, int to) {
    return channels_[static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) +
                     static_cast<std::size_t>(to)];
  }
  Event& event(int rank) { return events_[static_cast<std::size_t>(rank)]; }
  Communicator& rank(int rank);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // The first call counts.
  void Fail(int rank, std::string_view why) noexcept;
  int failed_rank() const { return failed_rank_; }  // once failed()
  [[noreturn]] void ThrowFailure() const;

 private:
  const int size_;
  std::vector<int> hosts_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::microseconds spin_;
  std::vector<Channel> channels_;
  std::vector<Event> events_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::mutex failing_;  // only when a rank fails
  std::atomic<bool> failed_{false};
  int failed_rank_ = kNoRank;
  std::string why_;
};

class ThreadGroup::Rank final : public Communicator {
 public:
  Rank(State& state, int rank) : state_(state), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return state_.size(); }
  std::span<const int> hosts() const override { return state_.hosts(); }
  std::chrono::milliseconds timeout() const override { return state_.timeout(); }
  std::unique_ptr<Transfer> Start(const Message& message) override;
  bool Progress() noexcept override { return state_.failed(); }
  void Abort(std::string_view why) noexcept override { state_.Fail(rank_, why); }
  CommCounters counters() const override { return counters_; }
  void ResetCounters() override { counters_ = {}; }
  void SetStep(const char* step, std::uint64_t signature) override {
    step_ = step;
    signature_ = signature;
  }

 private:
  class Move;

  // Waits until ready(), the failure of the group, or the deadline; throws in the last two cases.
  template <class Ready>
  void Await(const Ready& ready, int peer);
  // Of a slot that both sides have entered, by the second: copies a small message.
  void Match(Slot& slot, int from, int to) noexcept;
  void Reject(Slot& slot, int from, int to) noexcept;

  State& state_;
  const int rank_;
  CommCounters counters_;
  const char* step_ = "start";
  std::uint64_t signature_ = 0;
};

// One transfer of a rank.
class ThreadGroup::Rank::Move final : public Transfer {
 public:
  // Nothing in here may throw: the destructor would not run, and the peer would copy from or to
  // buffers that are gone.
  Move(Rank& rank, const Message& message) noexcept : rank_(rank), message_(message) {
    if (message.send.size() == 1) {  // the usual case; the caller's array may be a temporary
      piece_ = message.send.front();
      message_.send = {&piece_, 1};
    }
    if (message.from != kNoRank) PostReceive();
    if (message.to != kNoRank) PostSend();
  }

  ~Move() override {
    if (send_.slot != nullptr) Withdraw(*send_.slot, kReady);
    if (receive_.slot != nullptr) Withdraw(*receive_.slot, kSent);
  }

  void Wait() override {
    if (receive_.slot != nullptr) {
      AwaitMoved(*receive_.slot, message_.from);
      if (!message_.receive.empty()) {
        rank_.counters_.rounds = std::max(rank_.counters_.rounds, receive_.slot->depth + 1);
      }
      Leave(receive_, kReceiverDone, kSenderDone);
    }
    if (send_.slot != nullptr) {
      AwaitMoved(*send_.slot, message_.to);
      Leave(send_, kSenderDone, kReceiverDone);
    }
  }

 private:
  // One side of a message that this transfer has entered and not left.
  struct Post {
    Side side;
    Slot* slot = nullptr;
    ChannelEnd* end = nullptr;
    std::size_t place = 0;
  };

  void Take(Post& post, Channel& channel, ChannelEnd& end, std::size_t bytes) {
    const std::size_t place = end.Take();
    post = {{bytes, rank_.signature_, rank_.step_}, &channel.slots[place], &end, place};
  }

  void PostReceive() {
    Channel& channel = rank_.state_.channel(message_.from, rank_.rank_);
    Take(receive_, channel, channel.receiver, message_.receive.size());
    receive_.slot->receiver = &receive_.side;
    receive_.slot->target = message_.receive.data();
    Enter(*receive_.slot, kReady, kSent, message_.from, message_.from, rank_.rank_);
  }

  void PostSend() {
    Channel& channel = rank_.state_.channel(rank_.rank_, message_.to);
    std::size_t bytes = 0;
    for (const ConstBytes& piece : message_.send) bytes += piece.size();
    Take(send_, channel, channel.sender, bytes);
    send_.slot->sender = &send_.side;
    send_.slot->pieces = message_.send;
    send_.slot->depth = rank_.counters_.rounds;
    rank_.counters_.bytes += static_cast<std::int64_t>(bytes);
    rank_.counters_.messages += bytes > 0 ? 1 : 0;
    Enter(*send_.slot, kSent, kReady, message_.to, rank_.rank_, message_.to);
  }

  void Enter(Slot& slot, std::uint32_t own, std::uint32_t others, int peer, int from, int to) {
    const std::uint32_t before = slot.state.fetch_or(own, std::memory_order_acq_rel);
    if ((before & others) == 0 || (before & kWithdrawn) != 0) return;
    rank_.Match(slot, from, to);
    rank_.state_.event(peer).Notify();
  }

  void AwaitMoved(Slot& slot, int peer) {
    AwaitAny(slot, kMatched | kMoved | kRejected, peer);
    if (IsAny(slot, kMatched)) {
      CopyChunks(slot, peer);
      AwaitAny(slot, kMoved, peer);
    }
    if (IsAny(slot, kRejected)) rank_.state_.ThrowFailure();
  }

  static bool IsAny(const Slot& slot, std::uint32_t states) {
    return (slot.state.load(std::memory_order_acquire) & states) != 0;
  }

  void AwaitAny(const Slot& slot, std::uint32_t states, int peer) {
    rank_.Await([&] { return IsAny(slot, states); }, peer);
  }

  // Copies what the peer has not begun to copy.
  void CopyChunks(Slot& slot, int peer) {
    for (;;) {
      const std::size_t chunk = slot.claimed.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= slot.chunks()) return;
      CopyBytes(slot, chunk * kChunk, std::min(slot.bytes, (chunk + 1) * kChunk));
      if (slot.copied.fetch_add(1, std::memory_order_acq_rel) + 1 == slot.chunks()) {
        slot.state.fetch_or(kMoved, std::memory_order_acq_rel);
        rank_.state_.event(peer).Notify();
      }
    }
  }

  // The second to leave frees the slot. Nobody waits for that.
  static void Leave(Post& post, std::uint32_t own, std::uint32_t others) {
    if ((post.slot->state.fetch_or(own, std::memory_order_acq_rel) & others) != 0) {
      post.slot->claimed.store(0, std::memory_order_relaxed);
      post.slot->copied.store(0, std::memory_order_relaxed);
      post.slot->state.store(0, std::memory_order_release);
    }
    post.end->Leave(post.place);
    post.slot = nullptr;
  }

  // Makes sure that nobody copies from or to this side's buffer any more. The slot stays pending,
  // and so is never used again.
  static void Withdraw(Slot& slot, std::uint32_t others) {
    std::uint32_t state = slot.state.load(std::memory_order_acquire);
    while ((state & (kRejected | others)) == 0) {
      if (slot.state.compare_exchange_weak(state, state | kWithdrawn, std::memory_order_acq_rel)) {
        return;
      }
    }
    // The other side has entered: it finds a match, or copies, without anyone's help.
    while (!IsAny(slot, kMatched | kMoved | kRejected | kWithdrawn)) std::this_thread::yield();
    if (!IsAny(slot, kMatched)) return;
    // It shall copy no chunk that it has not begun.
    constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max() / 2;
    const std::size_t claimed = slot.claimed.exchange(kAll, std::memory_order_relaxed);
    if (claimed >= kAll) return;  // it has withdrawn, too
    const std::size_t begun = std::min(claimed, slot.chunks());
    while (slot.copied.load(std::memory_order_acquire) < begun) std::this_thread::yield();
  }

  Rank& rank_;
  Message message_;
  ConstBytes piece_;
  Post send_;
  Post receive_;
};

ThreadGroup::State::State(const ThreadRanks& options)
    : size_(options.ranks),
      hosts_(options.hosts.begin(), options.hosts.end()),
      timeout_(options.timeout),
      spin_(std::int64_t{options.ranks} * options.threads_per_rank <=
                    std::int64_t{std::thread::hardware_concurrency()}
                ? ThreadPool::kDefaultSpin
                : std::chrono::microseconds{0}),
      channels_(static_cast<std::size_t>(options.ranks) * static_cast<std::size_t>(options.ranks)),
      events_(static_cast<std::size_t>(options.ranks)) {
  hosts_.resize(static_cast<std::size_t>(size_));  // all 0 if none were given
  for (int r = 0; r < size_; ++r) ranks_.push_back(std::make_unique<Rank>(*this, r));
}

Communicator& ThreadGroup::State::rank(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

void ThreadGroup::State::Fail(int rank, std::string_view why) noexcept {
  {
    const std::scoped_lock lock(failing_);
    if (failed()) return;
    failed_rank_ = rank;
    try {
      why_ = why;
    } catch (const std::bad_alloc&) {  // the rank's number must do
    }
    failed_.store(true, std::memory_order_release);
  }
  for (Event& event : events_) event.Notify();
}

void ThreadGroup::State::ThrowFailure() const {
  Throw<CommError>("rank ", failed_rank_, " failed: ", why_);
}

std::unique_ptr<Transfer> ThreadGroup::Rank::Start(const Message& message) {
  if (state_.failed()) state_.ThrowFailure();
  RequirePeers(*this, message);
  if (message.to != kNoRank) {
    RequireRoom(*this, state_.channel(rank_, message.to).sender, "to", message.to);
  }
  if (message.from != kNoRank) {
    RequireRoom(*this, state_.channel(message.from, rank_).receiver, "from", message.from);
  }
  return std::make_unique<Move>(*this, message);
}

template <class Ready>
void ThreadGroup::Rank::Await(const Ready& ready, int peer) {
  const auto deadline = Clock::now() + state_.timeout();
  const bool in_time = state_.event(rank_).Await([&] { return ready() || state_.failed(); },
                                                 state_.spin(), deadline);
  if (ready()) return;
  if (!in_time && !state_.failed()) {
    std::ostringstream why;
    why << "it waited " << static_cast<double>(state_.timeout().count()) / 1e3 << " s for rank "
        << peer << " in step " << step_;
    state_.Fail(rank_, why.str());
  }
  state_.ThrowFailure();
}

void ThreadGroup::Rank::Match(Slot& slot, int from, int to) noexcept {
  if (slot.sender->bytes != slot.receiver->bytes ||
      slot.sender->signature != slot.receiver->signature) {
    Reject(slot, from, to);
  } else if (slot.sender->bytes > kChunk) {
    slot.bytes = slot.sender->bytes;
    slot.state.fetch_or(kMatched, std::memory_order_acq_rel);
  } else {
    CopyBytes(slot, 0, slot.sender->bytes);
    slot.state.fetch_or(kMoved, std::memory_order_acq_rel);
  }
}

void ThreadGroup::Rank::Reject(Slot& slot, int from, int to) noexcept {
  try {
    std::ostringstream why;
    why << "rank " << from << " sends " << slot.sender->bytes << " bytes in step "
        << slot.sender->step << ", rank " << to << " expects " << slot.receiver->bytes
        << " in step " << slot.receiver->step
        << ": the ranks were called with different shapes or options";
    state_.Fail(rank_, why.str());
  } catch (const std::bad_alloc&) {
    state_.Fail(rank_, "the ranks were called with different shapes or options");
  }
  slot.state.fetch_or(kRejected, std::memory_order_acq_rel);
}

ThreadGroup::ThreadGroup(const ThreadRanks& options) {
  Require(options.ranks >= 1 && options.ranks <= kMaxRanks, "ranks is ", options.ranks,
          "; it must be from 1 to ", kMaxRanks);
  Require(options.timeout.count() > 0 && options.timeout <= kMaxTimeout, "timeout is ",
          options.timeout.count(), " ms; it must be from 1 to ", kMaxTimeout.count());
  Require(options.threads_per_rank >= 1, "threads_per_rank is ", options.threads_per_rank,
          "; it must be at least 1");
  RequireHosts(options);
  state_ = std::make_unique<State>(options);
}

ThreadGroup::~ThreadGroup() = default;

Communicator& ThreadGroup::rank(int rank) {
  Require(rank >= 0 && rank < state_->size(), "rank is ", rank, "; it must be from 0 to ",
          state_->size() - 1);
  return state_->rank(rank);
}

int ThreadGroup::failed_rank() const { return state_->failed() ? state_->failed_rank() : kNoRank; }

void RunRanks(const ThreadRanks& options, const std::function<void(Communicator&)>& body) {
  ThreadGroup group(options);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options.ranks));
  const auto run = [&](int rank) {
    Communicator& comm = group.rank(rank);
    std::exception_ptr& error = errors[static_cast<std::size_t>(rank)];
    try {
      body(comm);
    } catch (const std::exception& e) {
      error = std::current_exception();
      comm.Abort(e.what());
    } catch (...) {
      error = std::current_exception();
      comm.Abort("an unknown exception");
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(errors.size());
  try {
    for (int r = 1; r < options.ranks; ++r) threads.emplace_back(run, r);
  } catch (...) {  // the system gave fewer threads
    group.rank(0).Abort("the system has no thread for it");
    for (std::thread& thread : threads) thread.join();
    throw;
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
  // What the others threw is only a consequence, unless the first rank caught its own error.
  if (const int rank = group.failed_rank(); rank != kNoRank) {
    std::swap(errors[0], errors[static_cast<std::size_t>(rank)]);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace treeline
