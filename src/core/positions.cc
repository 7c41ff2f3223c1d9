#include <algorithm>
#include <limits>

#include "core/check.h"
#include "treeline/layout.h"

namespace treeline {
namespace {

// Far below the limit of int64, so that sums of two positions cannot overflow.
constexpr std::int64_t kMaxPosition = std::numeric_limits<std::int64_t>::max() / 4;

std::int64_t At(const Positions::Segment& s, std::int64_t slot) {
  return s.first + slot / s.run * s.stride + slot % s.run;
}

std::int64_t CountBelowIn(const Positions::Segment& s, std::int64_t position) {
  if (position <= s.first) return 0;
  const std::int64_t offset = position - s.first;
  const std::int64_t runs = offset / s.stride;
  if (runs > s.count / s.run) return s.count;  // also keeps runs * run from overflowing
  return std::min(s.count, runs * s.run + std::min(offset % s.stride, s.run));
}

void ValidateSegment(const Positions::Segment& s) {
  Require(s.first >= 0 && s.first <= kMaxPosition, "first position is ", s.first,
          "; it must be from 0 to ", kMaxPosition);
  Require(s.count >= 0, "count is ", s.count, "; it must not be negative");
  Require(s.run >= 1, "run is ", s.run, "; it must be positive");
  Require(s.stride >= s.run, "stride is ", s.stride, "; it must be at least the run (", s.run, ")");
  if (s.count > 0) {
    const std::int64_t runs = (s.count - 1) / s.run;
    Require(runs == 0 || s.stride <= (kMaxPosition - s.first) / (runs + 1), s.count,
            " slots in runs of ", s.run, ", ", s.stride, " apart, reach beyond position ",
            kMaxPosition);
    Require(s.count <= kMaxPosition - s.first, s.count, " slots from position ", s.first,
            " reach beyond position ", kMaxPosition);
  }
}

}  // namespace

Positions Positions::Contiguous(std::int64_t first, std::int64_t count) {
  return Strided(
      {first, std::max<std::int64_t>(count, 1), std::max<std::int64_t>(count, 1), count});
}

Positions Positions::Strided(const Segment& segment) { return Joined(segment, {}); }

Positions Positions::Joined(const Segment& head, const Segment& tail) {
  ValidateSegment(head);
  ValidateSegment(tail);
  if (head.count > 0 && tail.count > 0) {
    Require(tail.first > At(head, head.count - 1), "position ", tail.first, " follows position ",
            At(head, head.count - 1), "; positions must increase");
  }
  Positions positions;
  positions.segments_ = {head, tail};
  return positions;
}

std::int64_t Positions::operator[](std::int64_t slot) const {
  const Segment& head = segments_[0];
  return slot < head.count ? At(head, slot) : At(segments_[1], slot - head.count);
}

std::int64_t Positions::CountBelow(std::int64_t position) const {
  return CountBelowIn(segments_[0], position) + CountBelowIn(segments_[1], position);
}

void Positions::Fill(std::int64_t begin, std::span<std::int64_t> target) const {
  for (std::size_t i = 0; i < target.size(); ++i) {
    target[i] = (*this)[begin + static_cast<std::int64_t>(i)];
  }
}

SlotRange Visible(const AttentionSpec& spec, std::int64_t position, const Positions& keys) {
  SlotRange range{0, keys.count()};
  if (spec.window > 0) {
    const std::int64_t reach = std::min(spec.window, kMaxPosition);
    range.begin = keys.CountBelow(position - reach + 1);
    range.end = keys.CountBelow(position + reach);
  }
  if (spec.causal) range.end = std::min(range.end, keys.CountBelow(position + 1));
  return range;
}

}  // namespace treeline
