// Ranks as processes, by non-blocking messages between two of them.
//
// What is sent starts with a header: its size, the sender's signature and step, and how many rounds
// led to it. A small message is packed behind its header. A large one follows in messages of its
// own, straight from the sender's memory to the receiver's. Both sides know the size and so agree
// about which it is; if they do not, the header, which is looked at first, shows it. No receive can
// match a message that it is too small for: Open MPI may write past its end. So there is room for
// any header, and segments have the size of their message as tag.
//
// Failures travel in a second communicator, where every rank always has a receive open: each wait
// looks there, too. No call of MPI that could wait for ever is made after the start.

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "comm/channel_end.h"
#include "core/check.h"
#include "core/hash.h"
#include "treeline/isa.h"
#include "treeline/mpi.h"
#include "treeline/version.h"

namespace treeline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTag = 0;                      // of headers, and of failures
constexpr std::size_t kPacked = 64 << 10;    // bytes up to which a message is packed
constexpr std::size_t kSegment = 256 << 10;  // of a large message
constexpr std::chrono::microseconds kSpin{100};
constexpr std::chrono::microseconds kYield{2000};  // where ranks share cores
constexpr std::chrono::microseconds kNap{20};
constexpr std::chrono::milliseconds kFarewell{200};    // to tell others of a failure
constexpr std::chrono::milliseconds kRemarkable{100};  // wait of a rank that learns of a failure

struct Header {
  std::uint64_t magic = 0x656e696c65657274;
  std::uint64_t bytes = 0;
  std::uint64_t signature = 0;
  std::int64_t depth = 0;  // rounds that led to this message
  std::array<char, 32> step{};
};

// What a rank that fails tells the others.
struct Farewell {
  int rank = kNoRank;
  std::array<char, 508> why{};
};

template <std::size_t kSize>
void CopyText(std::string_view text, std::array<char, kSize>& target) {
  const std::size_t length = std::min(text.size(), kSize - 1);
  std::copy_n(text.data(), length, target.data());
  target[length] = '\0';
}

void Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  Throw<CommError>(call, " failed: ", text.data());
}

std::size_t CountBytes(std::span<const ConstBytes> pieces) {
  std::size_t bytes = 0;
  for (const ConstBytes& piece : pieces) bytes += piece.size();
  return bytes;
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, const MpiOptions& options);
  ~MpiCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::span<const int> hosts() const override { return hosts_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  std::unique_ptr<Transfer> Start(const Message& message) override;
  bool Progress() noexcept override;
  void Abort(std::string_view why) noexcept override;
  CommCounters counters() const override { return counters_; }
  void ResetCounters() override { counters_ = {}; }
  void SetStep(const char* step, std::uint64_t signature) override {
    step_ = step;
    signature_ = signature;
  }

 private:
  class Move;

  // Throws CommError unless this rank was started like rank 0.
  void ShakeHands(const std::string& identity);
  void FindHosts();
  MPI_Comm Duplicate(MPI_Comm comm);
  int SegmentTag(std::size_t bytes) const {  // not kTag
    return 1 + static_cast<int>(bytes % static_cast<std::size_t>(most_tag_));
  }
  void AwaitRequest(MPI_Request& request);  // of all ranks
  void ExpectFarewell();
  // Looks for one.
  bool failed() noexcept;
  // `more` is what this rank was doing.
  [[noreturn]] void ThrowFailure(const std::string& more = "") const;
  [[noreturn]] void Fail(const std::string& why);
  // Waits until ready(), the failure of the group, or the deadline; throws in the last two cases.
  template <class Ready>
  void Await(const Ready& ready, const std::string& whom);

  const std::chrono::milliseconds timeout_;
  MPI_Comm messages_ = MPI_COMM_NULL;
  MPI_Comm failures_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int most_tag_ = 32767;  // what every MPI has; Open MPI has more
  bool crowded_ = false;  // more ranks than cores on this host
  std::vector<int> hosts_;
  std::vector<ChannelEnd> senders_;    // [peer]
  std::vector<ChannelEnd> receivers_;  // [peer]
  CommCounters counters_;
  const char* step_ = "start";
  std::uint64_t signature_ = 0;
  Farewell
      farewell_;  // the other rank's, or this rank's own; both live as long as MPI may use them
  Farewell own_farewell_;
  MPI_Request expected_ = MPI_REQUEST_NULL;
  bool failed_ = false;
  bool silent_ = false;  // MPI holds memory that may be gone: no call may let it go on
};

// One transfer of a rank.
class MpiCommunicator::Move final : public Transfer {
 public:
  Move(MpiCommunicator& comm, const Message& message) : comm_(comm), message_(message) {
    try {
      if (message.from != kNoRank) PostReceive();
      if (message.to != kNoRank) PostSend();
    } catch (...) {
      Withdraw();
      throw;
    }
  }

  ~Move() override { Withdraw(); }

  void Wait() override {
    if (receiving_) {
      // A message of another size may never be complete: its header says so.
      AwaitAll(std::span(receives_).first(1), message_.from);
      JudgeHeader();
      AwaitAll(std::span(receives_).subspan(1), message_.from);
      Accept();
      comm_.receivers_[Index(message_.from)].Leave(receive_place_);
      receiving_ = false;
    }
    if (sending_) {
      AwaitAll(sends_, message_.to);
      comm_.senders_[Index(message_.to)].Leave(send_place_);
      sending_ = false;
    }
  }

 private:
  static std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

  void PostReceive() {
    receive_place_ = comm_.receivers_[Index(message_.from)].Take();
    receiving_ = true;
    const Bytes target = message_.receive;
    constexpr std::size_t kMost = sizeof(Header) + kPacked;
    in_ = std::make_unique_for_overwrite<std::byte[]>(kMost);
    Receive({in_.get(), kMost}, kTag);
    if (target.size() <= kPacked) return;
    const int tag = comm_.SegmentTag(target.size());
    for (std::size_t begin = 0; begin < target.size(); begin += kSegment) {
      Receive(target.subspan(begin, std::min(kSegment, target.size() - begin)), tag);
    }
  }

  void Receive(Bytes bytes, int tag) {
    Check(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, message_.from, tag,
                    comm_.messages_, &receives_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Irecv");
  }

  void PostSend() {
    send_place_ = comm_.senders_[Index(message_.to)].Take();
    sending_ = true;
    const std::size_t bytes = CountBytes(message_.send);
    const bool packed = bytes <= kPacked;
    const std::size_t out_bytes = sizeof(Header) + (packed ? bytes : 0);
    out_ = std::make_unique_for_overwrite<std::byte[]>(out_bytes);
    Header header{.bytes = bytes, .signature = comm_.signature_, .depth = comm_.counters_.rounds};
    CopyText(comm_.step_, header.step);
    std::memcpy(out_.get(), &header, sizeof(header));
    if (packed) {
      std::byte* next = out_.get() + sizeof(Header);
      for (const ConstBytes& piece : message_.send) {
        if (piece.empty()) continue;
        std::memcpy(next, piece.data(), piece.size());
        next += piece.size();
      }
    }
    comm_.counters_.bytes += static_cast<std::int64_t>(bytes);
    comm_.counters_.messages += bytes > 0 ? 1 : 0;
    Send(out_.get(), static_cast<int>(out_bytes), MPI_BYTE, kTag);
    for (std::size_t begin = 0; !packed && begin < bytes; begin += kSegment) {
      SendSegment(begin, std::min(bytes, begin + kSegment), comm_.SegmentTag(bytes));
    }
  }

  // Bytes [begin, end) of the message, wherever their pieces lie.
  void SendSegment(std::size_t begin, std::size_t end, int tag) {
    std::vector<int> lengths;
    std::vector<const std::byte*> starts;
    std::size_t first = 0;  // of the piece
    for (const ConstBytes& piece : message_.send) {
      const std::size_t from = std::max(begin, first);
      const std::size_t to = std::min(end, first + piece.size());
      if (from < to) {
        lengths.push_back(static_cast<int>(to - from));
        starts.push_back(piece.data() + (from - first));
      }
      first += piece.size();
    }
    if (lengths.size() == 1) {  // the usual case, for which MPI is faster
      return Send(starts[0], lengths[0], MPI_BYTE, tag);
    }
    std::vector<MPI_Aint> addresses(starts.size());
    for (std::size_t i = 0; i < starts.size(); ++i) MPI_Get_address(starts[i], &addresses[i]);
    MPI_Datatype type = MPI_DATATYPE_NULL;
    Check(MPI_Type_create_hindexed(static_cast<int>(lengths.size()), lengths.data(),
                                   addresses.data(), MPI_BYTE, &type),
          "MPI_Type_create_hindexed");
    Check(MPI_Type_commit(&type), "MPI_Type_commit");
    Send(MPI_BOTTOM, 1, type, tag);
    Check(MPI_Type_free(&type), "MPI_Type_free");  // MPI keeps it as long as it needs it
  }

  void Send(const void* data, int count, MPI_Datatype type, int tag) {
    Check(MPI_Isend(data, count, type, message_.to, tag, comm_.messages_,
                    &sends_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Isend");
  }

  void AwaitAll(std::span<MPI_Request> requests, int peer) {
    if (requests.empty()) return;
    statuses_.resize(requests.size());
    comm_.Await(
        [&] {
          int done = 0;
          const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                                       statuses_.data());
          if (code == MPI_ERR_IN_STATUS) return CheckStatuses(peer);
          Check(code, "MPI_Testall");
          return done != 0;
        },
        "rank " + std::to_string(peer));
  }

  // Some requests have failed: the peer is gone.
  bool CheckStatuses(int peer) {
    for (const MPI_Status& status : statuses_) {
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) {
        Fail("the connection to rank " + std::to_string(peer) + " failed in step " + comm_.step_);
      }
    }
    return false;
  }

  // Compares what has come with what was expected.
  void JudgeHeader() {
    int count = 0;
    Check(MPI_Get_count(&statuses_.front(), MPI_BYTE, &count), "MPI_Get_count");
    const auto come = static_cast<std::size_t>(count);
    std::memcpy(&header_, in_.get(), std::min(sizeof(header_), come));
    header_.step.back() = '\0';
    const std::size_t bytes = message_.receive.size();
    if (come != sizeof(header_) + (bytes <= kPacked ? bytes : 0) ||
        header_.magic != Header{}.magic || header_.bytes != bytes ||
        header_.signature != comm_.signature_) {
      Fail("rank " + std::to_string(message_.from) + " sends " + std::to_string(header_.bytes) +
           " bytes in step " + header_.step.data() + ", rank " + std::to_string(comm_.rank_) +
           " expects " + std::to_string(bytes) + " bytes in step " + comm_.step_ +
           ": the ranks were called with different shapes or options");
    }
  }

  // All of the message has come.
  void Accept() {
    const std::size_t bytes = message_.receive.size();
    if (bytes == 0) return;
    if (bytes <= kPacked) std::memcpy(message_.receive.data(), in_.get() + sizeof(Header), bytes);
    comm_.counters_.rounds = std::max(comm_.counters_.rounds, header_.depth + 1);
  }

  [[noreturn]] void Fail(const std::string& why) { comm_.Fail(why); }

  // Takes back what MPI lets go. If it holds on to some, the others are told now, while the memory
  // is still there, and MPI is not called again: it would go on to use memory that may be gone.
  void Withdraw() noexcept {
    if (!receiving_ && !sending_) return;
    if (comm_.silent_) return Release();
    const auto drop = [](MPI_Request& request) {
      if (request == MPI_REQUEST_NULL) return true;
      MPI_Cancel(&request);
      int done = 0;
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done == 0) MPI_Request_free(&request);
      return done != 0;
    };
    bool all = true;
    for (MPI_Request& request : receives_) all = drop(request) && all;
    for (MPI_Request& request : sends_) all = drop(request) && all;
    if (all) return;
    comm_.Abort("it gave up a transfer");
    comm_.silent_ = true;
    Release();
  }

  // What MPI still holds must not be given back.
  void Release() noexcept {
    static_cast<void>(in_.release());
    static_cast<void>(out_.release());
  }

  MpiCommunicator& comm_;
  const Message message_;
  bool receiving_ = false;
  bool sending_ = false;
  std::size_t receive_place_ = 0;
  std::size_t send_place_ = 0;
  std::unique_ptr<std::byte[]> in_;  // header, and what is packed
  Header header_;                    // of what has come
  std::unique_ptr<std::byte[]> out_;
  std::vector<MPI_Request> receives_;
  std::vector<MPI_Request> sends_;
  std::vector<MPI_Status> statuses_;
};

MpiCommunicator::MpiCommunicator(MPI_Comm comm, const MpiOptions& options)
    : timeout_(options.timeout) {
  Check(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
  Check(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
  hosts_.resize(static_cast<std::size_t>(size_));
  senders_.resize(hosts_.size());
  receivers_.resize(hosts_.size());
  int* most_tag = nullptr;
  int found = 0;
  Check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most_tag, &found), "MPI_Comm_get_attr");
  if (found != 0) most_tag_ = *most_tag;
  messages_ = Duplicate(comm);
  failures_ = Duplicate(comm);
  ExpectFarewell();
  ShakeHands(options.identity);
  FindHosts();
  SetStep("start", 0);
}

MPI_Comm MpiCommunicator::Duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  Check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  AwaitRequest(request);
  Check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

void MpiCommunicator::AwaitRequest(MPI_Request& request) {
  Await(
      [&] {
        int done = 0;
        Check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        return done != 0;
      },
      "the other ranks");
}

MpiCommunicator::~MpiCommunicator() {
  if (silent_) return;
  if (expected_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&expected_);
    MPI_Request_free(&expected_);
  }
  // Freeing is collective: ranks that failed cannot.
  if (failed_) return;
  MPI_Comm_free(&messages_);
  MPI_Comm_free(&failures_);
}

void MpiCommunicator::ExpectFarewell() {
  Check(MPI_Irecv(&farewell_, sizeof(farewell_), MPI_BYTE, MPI_ANY_SOURCE, kTag, failures_,
                  &expected_),
        "MPI_Irecv");
}

bool MpiCommunicator::failed() noexcept {
  if (!failed_ && !silent_ && expected_ != MPI_REQUEST_NULL) {
    int done = 0;
    if (MPI_Test(&expected_, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0) failed_ = true;
  }
  return failed_;
}

void MpiCommunicator::ThrowFailure(const std::string& more) const {
  Throw<CommError>("rank ", farewell_.rank, " failed: ", farewell_.why.data(), more);
}

void MpiCommunicator::Fail(const std::string& why) {
  Abort(why);
  ThrowFailure();
}

void MpiCommunicator::Abort(std::string_view why) noexcept {
  if (failed()) return;
  failed_ = true;
  own_farewell_.rank = rank_;
  CopyText(why, own_farewell_.why);
  if (expected_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&expected_);
    MPI_Request_free(&expected_);
  }
  farewell_ = own_farewell_;
  if (failures_ == MPI_COMM_NULL) return;  // nobody has come
  std::vector<MPI_Request> requests;
  try {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      MPI_Isend(&own_farewell_, sizeof(own_farewell_), MPI_BYTE, peer, kTag, failures_,
                &requests.emplace_back(MPI_REQUEST_NULL));
    }
  } catch (const std::bad_alloc&) {  // the others wait until their deadline
  }
  const auto until = Clock::now() + kFarewell;
  int done = 0;
  while (done == 0 && Clock::now() < until) {
    if (MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                    MPI_STATUSES_IGNORE) != MPI_SUCCESS) {
      break;
    }
    std::this_thread::yield();
  }
}

template <class Ready>
void MpiCommunicator::Await(const Ready& ready, const std::string& whom) {
  const auto start = Clock::now();
  // Who waits for whom: lines of several ranks lead to the one that does not answer.
  const auto describe = [&](std::chrono::milliseconds waited) {
    std::ostringstream text;
    text << "waited " << static_cast<double>(waited.count()) / 1e3 << " s for " << whom
         << " in step " << step_;
    return text.str();
  };
  for (;;) {
    if (ready()) return;
    const auto now = Clock::now();
    if (failed()) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - start);
      if (waited < kRemarkable) ThrowFailure();
      ThrowFailure("; rank " + std::to_string(rank_) + " itself " + describe(waited));
    }
    if (now > start + timeout_) Fail("it " + describe(timeout_));
    if (now - start > (crowded_ ? kYield : kSpin)) {
      std::this_thread::sleep_for(kNap);
    } else if (crowded_) {
      std::this_thread::yield();
    }
  }
}

std::unique_ptr<Transfer> MpiCommunicator::Start(const Message& message) {
  if (failed()) ThrowFailure();
  RequirePeers(*this, message);
  if (message.to != kNoRank) {
    RequireRoom(*this, senders_[static_cast<std::size_t>(message.to)], "to", message.to);
  }
  if (message.from != kNoRank) {
    RequireRoom(*this, receivers_[static_cast<std::size_t>(message.from)], "from", message.from);
  }
  return std::make_unique<Move>(*this, message);
}

bool MpiCommunicator::Progress() noexcept { return failed(); }

// What must be the same on all ranks, as text that an error can show.
struct Identity {
  std::array<char, 32> version{};
  std::array<char, 16> isa{};
  std::array<char, 4040> other{};  // its beginning, and all of it as a number
  std::uint64_t hash = 0;
};

// Some characters of `text` from the word on in which it differs from `other`.
std::string Difference(std::string_view text, std::string_view other) {
  constexpr std::size_t kShown = 100;
  const auto same = std::ranges::mismatch(text, other).in1 - text.begin();
  const std::size_t space = text.substr(0, static_cast<std::size_t>(same)).rfind(' ');
  return std::string(text.substr(space == std::string_view::npos ? 0 : space + 1, kShown));
}

void MpiCommunicator::ShakeHands(const std::string& identity) {
  SetStep("handshake", 0);
  Identity own;
  CopyText(Version(), own.version);
  CopyText(Name(DefaultIsa()), own.isa);
  CopyText(identity, own.other);
  Hash hash;
  hash.Add(std::as_bytes(std::span(identity)));
  own.hash = hash.value();
  // Each rank compares itself with rank 0; rank 0 goes through all of them.
  const auto shake = [&](int peer) {
    Identity theirs;
    Exchange(std::as_bytes(std::span(&own, 1)), peer, std::as_writable_bytes(std::span(&theirs, 1)),
             peer);
    const auto compare = [&](const char* what, const char* mine, const char* others) {
      if (std::string_view(mine) == others) return;
      Fail(std::string("it has ") + what + " '" + Difference(mine, others) + "', rank " +
           std::to_string(peer) + " has '" + Difference(others, mine) +
           "'; they must be the same on all ranks");
    };
    compare("version", own.version.data(), theirs.version.data());
    compare("instruction set", own.isa.data(), theirs.isa.data());
    compare("options", own.other.data(), theirs.other.data());
    if (own.hash != theirs.hash) {
      Fail("its options differ from those of rank " + std::to_string(peer) +
           " far from their beginning; they must be the same on all ranks");
    }
  };
  for (int peer = rank_ == 0 ? 1 : 0; peer < (rank_ == 0 ? size_ : 1); ++peer) shake(peer);
  ResetCounters();
}

// By name, which is how Open MPI's split by shared memory finds them, but without a call that could
// wait for ever.
void MpiCommunicator::FindHosts() {
  SetStep("hosts", 0);
  using HostName = std::array<char, MPI_MAX_PROCESSOR_NAME>;
  HostName own{};
  int length = 0;
  Check(MPI_Get_processor_name(own.data(), &length), "MPI_Get_processor_name");
  std::vector<HostName> names(hosts_.size());
  MPI_Request request = MPI_REQUEST_NULL;
  Check(MPI_Iallgather(own.data(), own.size(), MPI_BYTE, names.data(), own.size(), MPI_BYTE,
                       messages_, &request),
        "MPI_Iallgather");
  AwaitRequest(request);
  // NOLINTNEXTLINE(clang-analyzer-optin.mpi.MPI-Checker): it has been waited for
  std::map<HostName, int> numbers;
  for (std::size_t r = 0; r < names.size(); ++r) {
    hosts_[r] = numbers.emplace(names[r], static_cast<int>(numbers.size())).first->second;
  }
  const auto neighbours = std::count(names.begin(), names.end(), own);
  crowded_ = neighbours > std::int64_t{std::thread::hardware_concurrency()};
}

}  // namespace

std::unique_ptr<Communicator> MakeMpiCommunicator(MPI_Comm comm, const MpiOptions& options) {
  Require(options.timeout.count() > 0 && options.timeout <= ThreadGroup::kMaxTimeout, "timeout is ",
          options.timeout.count(), " ms; it must be from 1 to ", ThreadGroup::kMaxTimeout.count());
  int initialised = 0;
  int finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  Require(initialised != 0, "MPI_Init_thread has not been called");
  Require(finalised == 0, "MPI_Finalize has been called");
  Require(comm != MPI_COMM_NULL, "the communicator is MPI_COMM_NULL; it must have ranks");
  return std::make_unique<MpiCommunicator>(comm, options);
}

}  // namespace treeline
