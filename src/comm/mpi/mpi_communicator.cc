// Ranks as processes, by non-blocking messages between two of them.
//
// What is sent starts with a header: its size, the sender's signature and step, and how many rounds
// led to it. A small message is packed behind its header. A large one follows in messages of its
// own, straight from the sender's memory to the receiver's. Both sides know the size and so agree
// about which it is; if they do not, the header, or MPI itself, shows it.
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
#include "treeline/isa.h"
#include "treeline/mpi.h"
#include "treeline/version.h"

namespace treeline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTag = 0;
constexpr std::size_t kPacked = 64 << 10;    // bytes up to which a message is packed
constexpr std::size_t kSegment = 256 << 10;  // of a large message
constexpr std::chrono::microseconds kSpin{100};
constexpr std::chrono::microseconds kYield{2000};  // where ranks share cores
constexpr std::chrono::microseconds kNap{20};
constexpr std::chrono::milliseconds kFarewell{200};  // to tell others of a failure

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
  void AwaitRequest(MPI_Request& request);  // of all ranks
  void ExpectFarewell();
  // Looks for one.
  bool failed() noexcept;
  [[noreturn]] void ThrowFailure() const;
  [[noreturn]] void Fail(const std::string& why);
  // Waits until ready(), the failure of the group, or the deadline; throws in the last two cases.
  template <class Ready>
  void Await(const Ready& ready, const std::string& whom);

  const std::chrono::milliseconds timeout_;
  MPI_Comm messages_ = MPI_COMM_NULL;
  MPI_Comm failures_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
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
      AwaitAll(receives_, message_.from);
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
    const bool packed = target.size() <= kPacked;
    in_bytes_ = sizeof(Header) + (packed ? target.size() : 0);
    in_ = std::make_unique_for_overwrite<std::byte[]>(in_bytes_);
    Receive({in_.get(), in_bytes_});
    for (std::size_t begin = 0; !packed && begin < target.size(); begin += kSegment) {
      Receive(target.subspan(begin, std::min(kSegment, target.size() - begin)));
    }
  }

  void Receive(Bytes bytes) {
    Check(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, message_.from, kTag,
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
    Send(out_.get(), static_cast<int>(out_bytes), MPI_BYTE);
    for (std::size_t begin = 0; !packed && begin < bytes; begin += kSegment) {
      SendSegment(begin, std::min(bytes, begin + kSegment));
    }
  }

  // Bytes [begin, end) of the message, wherever their pieces lie.
  void SendSegment(std::size_t begin, std::size_t end) {
    std::vector<int> lengths;
    std::vector<MPI_Aint> addresses;
    std::size_t first = 0;  // of the piece
    for (const ConstBytes& piece : message_.send) {
      const std::size_t from = std::max(begin, first);
      const std::size_t to = std::min(end, first + piece.size());
      if (from < to) {
        lengths.push_back(static_cast<int>(to - from));
        MPI_Get_address(piece.data() + (from - first), &addresses.emplace_back());
      }
      first += piece.size();
    }
    if (lengths.size() == 1) {  // the usual case, for which MPI is faster
      return Send(reinterpret_cast<const void*>(addresses[0]), lengths[0], MPI_BYTE);
    }
    MPI_Datatype type = MPI_DATATYPE_NULL;
    Check(MPI_Type_create_hindexed(static_cast<int>(lengths.size()), lengths.data(),
                                   addresses.data(), MPI_BYTE, &type),
          "MPI_Type_create_hindexed");
    Check(MPI_Type_commit(&type), "MPI_Type_commit");
    Send(MPI_BOTTOM, 1, type);
    Check(MPI_Type_free(&type), "MPI_Type_free");  // MPI keeps it as long as it needs it
  }

  void Send(const void* data, int count, MPI_Datatype type) {
    Check(MPI_Isend(data, count, type, message_.to, kTag, comm_.messages_,
                    &sends_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Isend");
  }

  void AwaitAll(std::vector<MPI_Request>& requests, int peer) {
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

  // Some requests have failed: a message that does not fit, or a peer that is gone.
  bool CheckStatuses(int peer) {
    for (const MPI_Status& status : statuses_) {
      int kind = MPI_SUCCESS;
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) {
        MPI_Error_class(status.MPI_ERROR, &kind);
      }
      if (kind == MPI_ERR_TRUNCATE) Reject("more than that");
      if (kind != MPI_SUCCESS) {
        Fail("the connection to rank " + std::to_string(peer) + " failed in step " + comm_.step_);
      }
    }
    return false;
  }

  // Compares what has come with what was expected, and unpacks it.
  void Accept() {
    int count = 0;
    Check(MPI_Get_count(&statuses_.front(), MPI_BYTE, &count), "MPI_Get_count");
    Header header;
    std::memcpy(&header, in_.get(), std::min(sizeof(header), static_cast<std::size_t>(count)));
    const std::size_t bytes = message_.receive.size();
    if (static_cast<std::size_t>(count) != in_bytes_ || header.magic != Header{}.magic ||
        header.bytes != bytes || header.signature != comm_.signature_) {
      header.step.back() = '\0';
      Reject(std::to_string(header.bytes) + " bytes in step " + header.step.data());
    }
    if (bytes == 0) return;
    if (bytes <= kPacked) std::memcpy(message_.receive.data(), in_.get() + sizeof(Header), bytes);
    comm_.counters_.rounds = std::max(comm_.counters_.rounds, header.depth + 1);
  }

  [[noreturn]] void Reject(const std::string& what) {
    Fail("rank " + std::to_string(message_.from) + " sends " + what + ", rank " +
         std::to_string(comm_.rank_) + " expects " + std::to_string(message_.receive.size()) +
         " bytes in step " + comm_.step_ +
         ": the ranks were called with different shapes or options");
  }

  [[noreturn]] void Fail(const std::string& why) { comm_.Fail(why); }

  // Takes back what MPI lets go; see MakeMpiCommunicator for what it does not.
  void Withdraw() noexcept {
    if (!receiving_ && !sending_) return;
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
    // What MPI still holds must not be given back.
    if (all) return;
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
  std::size_t in_bytes_ = 0;
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
  messages_ = Duplicate(comm);
  failures_ = Duplicate(comm);
  ExpectFarewell();
  ShakeHands(options.identity);
  FindHosts();
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
  if (!failed_ && expected_ != MPI_REQUEST_NULL) {
    int done = 0;
    if (MPI_Test(&expected_, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0) failed_ = true;
  }
  return failed_;
}

void MpiCommunicator::ThrowFailure() const {
  Throw<CommError>("rank ", farewell_.rank, " failed: ", farewell_.why.data());
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
  const auto deadline = start + timeout_;
  for (;;) {
    if (ready()) return;
    if (failed()) ThrowFailure();
    const auto now = Clock::now();
    if (now > deadline) {
      std::ostringstream why;
      why << "it waited " << static_cast<double>(timeout_.count()) / 1e3 << " s for " << whom
          << " in step " << step_;
      Fail(why.str());
    }
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
  std::array<char, 976> other{};
};

void MpiCommunicator::ShakeHands(const std::string& identity) {
  SetStep("handshake", 0);
  Identity own;
  CopyText(Version(), own.version);
  CopyText(Name(DefaultIsa()), own.isa);
  CopyText(identity, own.other);
  // Each rank compares itself with rank 0; rank 0 goes through all of them.
  const auto shake = [&](int peer) {
    Identity theirs;
    Exchange(std::as_bytes(std::span(&own, 1)), peer, std::as_writable_bytes(std::span(&theirs, 1)),
             peer);
    const auto compare = [&](const char* what, const char* mine, const char* others) {
      if (std::string_view(mine) == others) return;
      Fail(std::string("it has ") + what + " '" + mine + "', rank " + std::to_string(peer) +
           " has '" + others + "'; they must be the same on all ranks");
    };
    compare("version", own.version.data(), theirs.version.data());
    compare("instruction set", own.isa.data(), theirs.isa.data());
    compare("options", own.other.data(), theirs.other.data());
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
  AwaitRequest(request);  // NOLINT(clang-analyzer-optin.mpi.MPI-Checker): it is waited for there
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
  MPI_Initialized(&initialised);
  Require(initialised != 0, "MPI_Init_thread has not been called");
  return std::make_unique<MpiCommunicator>(comm, options);
}

}  // namespace treeline
