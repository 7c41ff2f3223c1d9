#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "treeline/spec.h"

namespace treeline {

// Slots [begin, end) of a shard.
struct SlotRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const SlotRange&) const = default;
};

// The absolute token position of every slot of a shard, strictly increasing, in constant space.
class Positions {
 public:
  // Position of slot i: first + (i / run) * stride + i % run.
  struct Segment {
    std::int64_t first = 0;
    std::int64_t run = 1;
    std::int64_t stride = 1;
    std::int64_t count = 0;
  };

  Positions() = default;

  // first, first + 1, …
  static Positions Contiguous(std::int64_t first, std::int64_t count);
  // Runs of `run` consecutive positions, `stride` apart.
  static Positions Strided(const Segment& segment);
  // The slots of `head`, then those of `tail`.
  static Positions Joined(const Segment& head, const Segment& tail);

  std::int64_t count() const { return segments_[0].count + segments_[1].count; }

  // Position of a slot in [0, count()).
  std::int64_t operator[](std::int64_t slot) const;

  // How many slots hold a position below `position`.
  std::int64_t CountBelow(std::int64_t position) const;

  // Positions of slots [begin, begin + target.size()).
  void Fill(std::int64_t begin, std::span<std::int64_t> target) const;

 private:
  std::array<Segment, 2> segments_;
};

// The keys that a query at `position` sees: one range of slots, because slots are in increasing
// position. Empty where it sees none.
SlotRange Visible(const AttentionSpec& spec, std::int64_t position, const Positions& keys);

enum class LayoutKind : std::uint8_t { kContiguous, kStriped, kZigzag };

std::string_view Name(LayoutKind kind);

// Which rank holds which of `tokens` tokens. Any length, any number of ranks: a rank may hold none.
class Layout {
 public:
  // Rank r holds chunk r of `ranks` near-equal chunks.
  static Layout Contiguous(std::int64_t tokens, int ranks);
  // Runs of `run` tokens are dealt round robin: run j lives on rank (first_rank + j) mod ranks.
  // Throws ArgumentError if `first_rank` is not in [0, ranks).
  static Layout Striped(std::int64_t tokens, int ranks, std::int64_t run = 1, int first_rank = 0);
  // Rank r holds chunks r and 2 * ranks - 1 - r of 2 * ranks near-equal chunks.
  static Layout Zigzag(std::int64_t tokens, int ranks);
  // Striped, with weights[r] runs of every sum(weights) on rank r. A weight of 0 gives no tokens.
  static Layout Weighted(std::int64_t tokens, std::span<const int> weights, std::int64_t run = 1);

  LayoutKind kind() const { return kind_; }
  std::int64_t tokens() const { return tokens_; }
  int ranks() const { return static_cast<int>(weights_.size()); }

  // Throws ArgumentError if `rank` is not in [0, ranks()).
  Positions Shard(int rank) const;

  // The rank that holds `position`. Throws ArgumentError if it is not in [0, tokens()).
  int Owner(std::int64_t position) const;

 private:
  Layout(LayoutKind kind, std::int64_t tokens, std::vector<int> weights, std::int64_t run,
         int first_rank = 0);

  LayoutKind kind_;
  std::int64_t tokens_;
  std::vector<int> weights_;  // [ranks]; all 1 unless Weighted
  std::int64_t run_;
  int first_rank_;  // holds the first run; 0 unless Striped
  std::int64_t weight_sum_ = 0;
};

}  // namespace treeline
