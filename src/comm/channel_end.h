#pragma once

#include <cstddef>
#include <cstdint>

#include "treeline/comm.h"

namespace treeline {

// Where a rank is in its messages to, or from, one peer. Messages take places by turns.
class ChannelEnd {
 public:
  static constexpr std::size_t kPlaces = std::size_t{2} * Communicator::kMaxPending;

  // Whether too many messages have not been left for another one to be taken.
  bool full() const {
    return (pending_ >> ((next_ + kPlaces - Communicator::kMaxPending) % kPlaces) & 1) != 0;
  }

  // The place of the next message.
  std::size_t Take() {
    const std::size_t place = next_++ % kPlaces;
    pending_ |= 1u << place;
    return place;
  }
  void Leave(std::size_t place) { pending_ &= ~(1u << place); }

 private:
  std::size_t next_ = 0;       // messages taken so far
  std::uint32_t pending_ = 0;  // a bit for every place that has not been left
};

// What Communicator::Start promises about bad messages, for every transport. Throws ArgumentError
// unless each peer is another rank of the group, or none and its side empty.
void RequirePeers(const Communicator& comm, const Message& message);

// Throws ArgumentError if `end`, of messages "to" or "from" a peer, is full.
void RequireRoom(const Communicator& comm, const ChannelEnd& end, const char* direction, int peer);

}  // namespace treeline
