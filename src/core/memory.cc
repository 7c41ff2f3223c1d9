#include "treeline/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

namespace treeline {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Of large memory: whole huge pages, so that streams through it do not miss the TLB at every 4 KB.
bool IsLarge(std::size_t bytes) { return bytes >= 2 * kHugePage; }

std::align_val_t AlignmentOf(std::size_t bytes) {
  return std::align_val_t{IsLarge(bytes) ? kHugePage : 64};
}

std::byte* Allocate(std::size_t bytes) {
  void* data = ::operator new(bytes, AlignmentOf(bytes));
#ifdef MADV_HUGEPAGE
  if (IsLarge(bytes)) madvise(data, bytes, MADV_HUGEPAGE);  // a wish: without it, all is as right
#endif
  return static_cast<std::byte*>(data);
}

}  // namespace

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

TrackedBytes::TrackedBytes(std::size_t bytes, Purpose purpose, MemoryTracker* tracker)
    : bytes_(bytes), purpose_(purpose), tracker_(tracker) {
  if (tracker_ != nullptr) tracker_->Add(purpose_, bytes_);
}

TrackedBytes::~TrackedBytes() {
  if (tracker_ != nullptr) tracker_->Remove(purpose_, bytes_);
}

TrackedBytes::TrackedBytes(TrackedBytes&& other) noexcept { *this = std::move(other); }

TrackedBytes& TrackedBytes::operator=(TrackedBytes&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(purpose_, other.purpose_);
  std::swap(tracker_, other.tracker_);
  return *this;
}

TrackedBuffer::TrackedBuffer(std::size_t bytes, Purpose purpose, MemoryTracker* tracker)
    : data_(Allocate(bytes)), counted_(bytes, purpose, tracker) {
#ifndef NDEBUG
  std::memset(data_, 0xFF, bytes);  // NaN: reading what was not written shows
#endif
}

TrackedBuffer::~TrackedBuffer() {
  if (data_ != nullptr) ::operator delete(data_, AlignmentOf(size()));
}

TrackedBuffer::TrackedBuffer(TrackedBuffer&& other) noexcept { *this = std::move(other); }

TrackedBuffer& TrackedBuffer::operator=(TrackedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(counted_, other.counted_);
  return *this;
}

}  // namespace treeline
