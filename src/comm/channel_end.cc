#include "comm/channel_end.h"

#include "core/check.h"

namespace treeline {
namespace {

void RequirePeer(const Communicator& comm, int peer) {
  Require(peer >= 0 && peer < comm.size() && peer != comm.rank(), "rank ", comm.rank(), " of ",
          comm.size(), " has no peer ", peer);
}

}  // namespace

void RequirePeers(const Communicator& comm, const Message& message) {
  if (message.to == kNoRank) {
    for (const ConstBytes& piece : message.send) {
      Require(piece.empty(), "rank ", comm.rank(), " sends ", piece.size(), " bytes to no rank");
    }
  } else {
    RequirePeer(comm, message.to);
  }
  if (message.from == kNoRank) {
    Require(message.receive.empty(), "rank ", comm.rank(), " expects ", message.receive.size(),
            " bytes from no rank");
  } else {
    RequirePeer(comm, message.from);
  }
}

void RequireRoom(const Communicator& comm, const ChannelEnd& end, const char* direction, int peer) {
  Require(!end.full(), "rank ", comm.rank(), " has not waited for the transfer ",
          Communicator::kMaxPending, " before this one ", direction, " rank ", peer);
}

}  // namespace treeline
