#include "schedule/kv_ring.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>

namespace treeline {
namespace {

bool IsDenseSide(const KvSide& side, DType dtype, int kv_heads) {
  const auto row = static_cast<std::int64_t>(RowBytes(dtype, side.dim));
  return side.pages == nullptr && side.head_stride == row && side.slot_stride == row * kv_heads;
}

}  // namespace

KvRing::KvRing(Communicator& comm, Backend& backend, const AttentionSpec& spec,
               std::span<const KvShard> shards)
    : comm_(comm), backend_(backend), spec_(spec), shards_(shards), order_(shards.size()) {
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::ranges::stable_sort(order_, std::ranges::greater{},
                           [&](std::size_t i) { return Alignment(shards_[i].kv.dtype); });
}

void KvRing::Run(const std::function<void(const KvBlock&)>& visit) {
  const int n = comm_.size();
  const int rank = comm_.rank();
  if (n == 1) return visit(OwnBlock());
  const int to = (rank + 1) % n;
  const int from = (rank + n - 1) % n;
  const auto owner_at = [&](int step) { return (rank + n - step) % n; };

  std::array<std::size_t, 2> sizes{};  // buffer i receives in steps i, i + 2, …
  for (int step = 0; step < n - 1; ++step) {
    std::size_t& size = sizes[static_cast<std::size_t>(step % 2)];
    size = std::max(size, BlockBytes(owner_at(step + 1)));
  }
  const bool dense = IsDense();
  if (!dense) sizes[1] = std::max(sizes[1], BlockBytes(rank));
  const std::array<TrackedBuffer, 2> buffers{backend_.Allocate(sizes[0], Purpose::kInFlight),
                                             backend_.Allocate(sizes[1], Purpose::kInFlight)};

  KvBlock block = OwnBlock();
  std::vector<ConstBytes> pieces;
  if (dense) {
    pieces = DensePieces();
  } else {
    Pack(buffers[1].data());
    block = BlockAt(buffers[1].data(), rank);
    pieces = {{buffers[1].data(), BlockBytes(rank)}};
  }
  for (int step = 0; step < n - 1; ++step) {
    std::byte* target = buffers[static_cast<std::size_t>(step % 2)].data();
    const int next_owner = owner_at(step + 1);
    const std::size_t bytes = BlockBytes(next_owner);
    const auto transfer =
        comm_.Start({.send = pieces, .to = to, .receive = {target, bytes}, .from = from});
    visit(block);
    transfer->Wait();
    block = BlockAt(target, next_owner);
    pieces = {{target, bytes}};
  }
  visit(block);
}

std::size_t KvRing::BlockBytes(int owner) const {
  std::size_t bytes = 0;
  for (const KvShard& shard : shards_) {
    const auto rows =
        static_cast<std::size_t>(shard.shards[static_cast<std::size_t>(owner)].count()) *
        static_cast<std::size_t>(spec_.kv_heads);
    bytes += rows * (RowBytes(shard.kv.dtype, spec_.head_dim) +
                     RowBytes(shard.kv.dtype, spec_.v_head_dim));
  }
  return bytes;
}

KvBlock KvRing::OwnBlock() const {
  KvBlock block{.owner = comm_.rank()};
  for (const KvShard& shard : shards_) {
    block.views.push_back(shard.kv);
    block.positions.push_back(shard.shards[static_cast<std::size_t>(comm_.rank())]);
  }
  return block;
}

KvBlock KvRing::BlockAt(std::byte* bytes, int owner) const {
  KvBlock block{.owner = owner};
  block.views.resize(shards_.size());
  block.positions.resize(shards_.size());
  for (const std::size_t i : order_) {
    const KvShard& shard = shards_[i];
    const Positions& positions = shard.shards[static_cast<std::size_t>(owner)];
    const auto dense = [&](int dim) {
      const TensorView view =
          TensorView::Dense(bytes, shard.kv.dtype, positions.count(), spec_.kv_heads, dim);
      bytes += positions.count() * view.token_stride;
      return view;
    };
    const TensorView k = dense(spec_.head_dim);
    block.views[i] = KvView::Strided(k, dense(spec_.v_head_dim));
    block.positions[i] = positions;
  }
  return block;
}

bool KvRing::IsDense() const {
  return std::all_of(shards_.begin(), shards_.end(), [&](const KvShard& shard) {
    return IsDenseSide(shard.kv.k, shard.kv.dtype, spec_.kv_heads) &&
           IsDenseSide(shard.kv.v, shard.kv.dtype, spec_.kv_heads);
  });
}

std::vector<ConstBytes> KvRing::DensePieces() const {
  std::vector<ConstBytes> pieces;
  for (const std::size_t i : order_) {
    const KvShard& shard = shards_[i];
    for (const KvSide& side : {shard.kv.k, shard.kv.v}) {
      pieces.emplace_back(static_cast<const std::byte*>(side.base),
                          static_cast<std::size_t>(shard.kv.slots * side.slot_stride));
    }
  }
  return pieces;
}

void KvRing::Pack(std::byte* target) const {
  for (const std::size_t i : order_) {
    const KvShard& shard = shards_[i];
    for (const KvSide& side : {shard.kv.k, shard.kv.v}) {
      const std::size_t row = RowBytes(shard.kv.dtype, side.dim);
      for (std::int64_t slot = 0; slot < shard.kv.slots; ++slot) {
        for (int head = 0; head < spec_.kv_heads; ++head) {
          std::memcpy(target, side.Row(slot, head, shard.kv.page_slots), row);
          target += row;
        }
      }
    }
  }
}

}  // namespace treeline
