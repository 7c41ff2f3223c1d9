#include "schedule/collective_call.h"

#include "core/check.h"

namespace treeline {
bool SamePositions(const Positions& a, const Positions& b) {
  if (a.count() != b.count()) return false;
  // Positions increase and come in at most two strided segments: ends and middle tell.
  for (const std::int64_t slot : {std::int64_t{0}, a.count() / 2, a.count() - 1}) {
    if (slot >= 0 && slot < a.count() && a[slot] != b[slot]) return false;
  }
  return true;
}

Signature& Signature::AddBytes(std::span<const std::byte> bytes) {
  hash_.Add(bytes);
  return *this;
}

Signature& Signature::Add(const AttentionSpec& spec) {
  Add(spec.heads).Add(spec.kv_heads).Add(spec.head_dim).Add(spec.v_head_dim);
  Add(spec.scale).Add(spec.causal).Add(spec.window).Add(spec.softcap);
  Add(spec.bf16_terms).Add(spec.int8_queries);
  // With their lengths: slopes must not look like sinks.
  Add(spec.alibi_slopes.size()).AddBytes(std::as_bytes(std::span(spec.alibi_slopes)));
  return Add(spec.sinks.size()).AddBytes(std::as_bytes(std::span(spec.sinks)));
}

Signature& Signature::Add(std::span<const Positions> shards) {
  for (const Positions& shard : shards) {
    Add(shard.count());
    if (shard.count() > 0) Add(shard[0]).Add(shard[shard.count() - 1]);
  }
  return *this;
}

void RequireShards(const Communicator& comm, std::span<const Positions> shards,
                   const Positions& own, std::size_t index, const char* what) {
  Require(shards.size() == static_cast<std::size_t>(comm.size()), "task ", index, " has ",
          shards.size(), " ", what, " shards; there are ", comm.size(), " ranks");
  Require(SamePositions(shards[static_cast<std::size_t>(comm.rank())], own), "task ", index,
          ": the ", what, " shard of rank ", comm.rank(), " differs from the rank's own positions");
}

}  // namespace treeline
