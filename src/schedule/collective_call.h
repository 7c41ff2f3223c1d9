#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string_view>

#include "core/hash.h"
#include "treeline/schedule.h"

namespace treeline {

// Runs the body of a collective call. If it throws, the other ranks are told at once: they would
// wait for this one otherwise.
template <class Body>
void RunCollective(Communicator& comm, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    comm.Abort(error.what());
    throw;
  } catch (...) {
    comm.Abort("an unknown exception");
    throw;
  }
}

// What must be the same on all ranks, as one number that messages carry.
class Signature {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T> Signature& Add(const T& value) {
    return AddBytes(std::as_bytes(std::span(&value, 1)));
  }
  Signature& Add(const AttentionSpec& spec);
  // Of all ranks.
  Signature& Add(std::span<const Positions> shards);

  std::uint64_t value() const { return hash_.value(); }

 private:
  Signature& AddBytes(std::span<const std::byte> bytes);

  Hash hash_;
};

// Whether two shards hold the same tokens.
bool SamePositions(const Positions& a, const Positions& b);

// Throws ArgumentError unless the shards of a task fit the communicator and the task. `what` and
// `index` name the task.
void RequireShards(const Communicator& comm, std::span<const Positions> shards,
                   const Positions& own, std::size_t index, const char* what);

}  // namespace treeline
