#include "treeline/memory.h"

#include <cstring>
#include <new>
#include <utility>

namespace treeline {
namespace {
constexpr std::align_val_t kAlignment{64};
}

void MemoryTracker::Counter::Add(std::size_t bytes) {
  const std::size_t now = held.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::size_t highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
}

void MemoryTracker::Add(Purpose purpose, std::size_t bytes) {
  counters_[static_cast<std::size_t>(purpose)].Add(bytes);
  total_.Add(bytes);
}

void MemoryTracker::Remove(Purpose purpose, std::size_t bytes) {
  counters_[static_cast<std::size_t>(purpose)].held.fetch_sub(bytes, std::memory_order_relaxed);
  total_.held.fetch_sub(bytes, std::memory_order_relaxed);
}

std::size_t MemoryTracker::held(Purpose purpose) const {
  return counters_[static_cast<std::size_t>(purpose)].held.load(std::memory_order_relaxed);
}

std::size_t MemoryTracker::peak(Purpose purpose) const {
  return counters_[static_cast<std::size_t>(purpose)].peak.load(std::memory_order_relaxed);
}

std::size_t MemoryTracker::peak() const { return total_.peak.load(std::memory_order_relaxed); }

void MemoryTracker::ResetPeaks() {
  for (Counter& counter : counters_) counter.peak = counter.held.load();
  total_.peak = total_.held.load();
}

TrackedBuffer::TrackedBuffer(std::size_t bytes, Purpose purpose, MemoryTracker* tracker)
    : data_(static_cast<std::byte*>(::operator new(bytes, kAlignment))),
      bytes_(bytes),
      purpose_(purpose),
      tracker_(tracker) {
#ifndef NDEBUG
  std::memset(data_, 0xFF, bytes_);  // NaN: reading what was not written shows
#endif
  if (tracker_ != nullptr) tracker_->Add(purpose_, bytes_);
}

TrackedBuffer::~TrackedBuffer() {
  if (data_ == nullptr) return;
  ::operator delete(data_, kAlignment);
  if (tracker_ != nullptr) tracker_->Remove(purpose_, bytes_);
}

TrackedBuffer::TrackedBuffer(TrackedBuffer&& other) noexcept { *this = std::move(other); }

TrackedBuffer& TrackedBuffer::operator=(TrackedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(purpose_, other.purpose_);
  std::swap(tracker_, other.tracker_);
  return *this;
}

}  // namespace treeline
