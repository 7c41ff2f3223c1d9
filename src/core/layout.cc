#include "treeline/layout.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace treeline {
namespace {

// Keeps the product of a length and a rank count, or of a run and a sum of weights, within int64.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr int kMaxRanks = 1 << 20;
constexpr std::int64_t kMaxWeight = 1 << 20;

// Chunk c of `chunks` covers [Start(c), Start(c + 1)).
std::int64_t ChunkStart(std::int64_t tokens, std::int64_t chunks, std::int64_t c) {
  return c * tokens / chunks;
}

Positions::Segment Chunk(std::int64_t tokens, std::int64_t chunks, std::int64_t c) {
  const std::int64_t first = ChunkStart(tokens, chunks, c);
  const std::int64_t count = ChunkStart(tokens, chunks, c + 1) - first;
  const std::int64_t run = std::max<std::int64_t>(count, 1);
  return {first, run, run, count};
}

// The largest chunk that starts at or before `position`, which is the one that holds it.
std::int64_t ChunkOf(std::int64_t tokens, std::int64_t chunks, std::int64_t position) {
  return ((position + 1) * chunks - 1) / tokens;
}

}  // namespace

std::string_view Name(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::kContiguous:
      return "contiguous";
    case LayoutKind::kStriped:
      return "striped";
    case LayoutKind::kZigzag:
      return "zigzag";
  }
  Throw<ArgumentError>("layout ", static_cast<int>(kind),
                       " is not one of contiguous, striped, zigzag");
}

Layout::Layout(LayoutKind kind, std::int64_t tokens, std::vector<int> weights, std::int64_t run,
               int first_rank)
    : kind_(kind),
      tokens_(tokens),
      weights_(std::move(weights)),
      run_(run),
      first_rank_(first_rank) {
  Require(tokens >= 0 && tokens <= kMaxTokens, "tokens is ", tokens, "; it must be from 0 to ",
          kMaxTokens);
  Require(run >= 1 && run <= kMaxWeight, "run is ", run, "; it must be from 1 to ", kMaxWeight);
  for (std::size_t r = 0; r < weights_.size(); ++r) {
    Require(weights_[r] >= 0, "weights[", r, "] is ", weights_[r], "; it must not be negative");
    weight_sum_ += weights_[r];
  }
  Require(weight_sum_ >= 1 && weight_sum_ <= kMaxWeight, "weights sum to ", weight_sum_,
          "; they must sum to 1 to ", kMaxWeight);
  Require(first_rank >= 0 && first_rank < ranks(), "first_rank is ", first_rank,
          "; it must be from 0 to ", ranks() - 1);
}

namespace {

std::vector<int> EqualWeights(int ranks) {
  Require(ranks >= 1 && ranks <= kMaxRanks, "ranks is ", ranks, "; it must be from 1 to ",
          kMaxRanks);
  return std::vector<int>(static_cast<std::size_t>(ranks), 1);
}

}  // namespace

Layout Layout::Contiguous(std::int64_t tokens, int ranks) {
  return {LayoutKind::kContiguous, tokens, EqualWeights(ranks), 1};
}

Layout Layout::Striped(std::int64_t tokens, int ranks, std::int64_t run, int first_rank) {
  return {LayoutKind::kStriped, tokens, EqualWeights(ranks), run, first_rank};
}

Layout Layout::Zigzag(std::int64_t tokens, int ranks) {
  return {LayoutKind::kZigzag, tokens, EqualWeights(ranks), 1};
}

Layout Layout::Weighted(std::int64_t tokens, std::span<const int> weights, std::int64_t run) {
  return {LayoutKind::kStriped, tokens, {weights.begin(), weights.end()}, run};
}

Positions Layout::Shard(int rank) const {
  Require(rank >= 0 && rank < ranks(), "rank is ", rank, "; it must be from 0 to ", ranks() - 1);
  switch (kind_) {
    case LayoutKind::kContiguous:
      return Positions::Strided(Chunk(tokens_, ranks(), rank));
    case LayoutKind::kZigzag: {
      const std::int64_t chunks = 2 * std::int64_t{ranks()};
      return Positions::Joined(Chunk(tokens_, chunks, rank),
                               Chunk(tokens_, chunks, chunks - 1 - rank));
    }
    case LayoutKind::kStriped:
      break;
  }
  // A round goes from first_rank_ up and around. Where that is not 0, all weights are equal.
  const int turn = rank >= first_rank_ ? rank - first_rank_ : rank - first_rank_ + ranks();
  // The runs of a rank within one round are neighbours, so they are one longer run.
  const std::int64_t first =
      std::accumulate(weights_.begin(), weights_.begin() + turn, std::int64_t{0}) * run_;
  const std::int64_t stride = weight_sum_ * run_;
  const std::int64_t run = weights_[static_cast<std::size_t>(turn)] * run_;
  if (run == 0) return {};
  const std::int64_t last_round = std::clamp<std::int64_t>(tokens_ % stride - first, 0, run);
  return Positions::Strided({first, run, stride, tokens_ / stride * run + last_round});
}

int Layout::Owner(std::int64_t position) const {
  Require(position >= 0 && position < tokens_, "position is ", position, "; it must be from 0 to ",
          tokens_ - 1);
  switch (kind_) {
    case LayoutKind::kContiguous:
      return static_cast<int>(ChunkOf(tokens_, ranks(), position));
    case LayoutKind::kZigzag: {
      const std::int64_t chunks = 2 * std::int64_t{ranks()};
      const std::int64_t chunk = ChunkOf(tokens_, chunks, position);
      return static_cast<int>(std::min(chunk, chunks - 1 - chunk));
    }
    case LayoutKind::kStriped:
      break;
  }
  std::int64_t in_round = position / run_ % weight_sum_;
  int turn = 0;
  while (in_round >= weights_[static_cast<std::size_t>(turn)]) {
    in_round -= weights_[static_cast<std::size_t>(turn)];
    ++turn;
  }
  return (first_rank_ + turn) % ranks();
}

}  // namespace treeline
