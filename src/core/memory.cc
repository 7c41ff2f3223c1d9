#include "treeline/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
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

thread_local bool thread_is_ending = false;  // its Spares are gone

// Sanitizers are to see every use of what was given back.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
#else
constexpr bool kSanitized = false;
#endif

// Buffers that this thread has given back and may have again: eight of 128 KiB at most. Steps of
// decoding take and give back dozens of the same small ones; for each of them the system's
// allocator takes a lock, and threads that are ranks would wait for each other there.
class Spares {
 public:
  static constexpr bool kUsed = !kSanitized;
  static constexpr std::size_t kMostBytes = std::size_t{128} << 10;  // of a buffer

  Spares() = default;
  ~Spares() {
    thread_is_ending = true;
    for (const Piece& piece : pieces_) ::operator delete(piece.data, AlignmentOf(piece.bytes));
  }
  Spares(const Spares&) = delete;
  Spares& operator=(const Spares&) = delete;

  // What a buffer of so many bytes takes: sizes are few, so that pieces fit again.
  static std::size_t PieceBytes(std::size_t bytes) {
    constexpr std::size_t kLeast = 256;
    return kUsed && bytes <= kMostBytes ? std::bit_ceil(std::max(bytes, kLeast)) : bytes;
  }

  // Null if there is none.
  static std::byte* Take(std::size_t piece_bytes) {
    if (!kUsed || piece_bytes > kMostBytes || thread_is_ending) return nullptr;
    for (Piece& piece : OfThisThread().pieces_) {
      if (piece.bytes != piece_bytes || piece.data == nullptr) continue;
      return std::exchange(piece.data, nullptr);
    }
    return nullptr;
  }

  // Memory of a buffer, or none.
  struct Piece {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  // Takes a piece in, instead of an older one if there is no room; returns what is to be freed.
  static Piece Keep(Piece kept) {
    if (!kUsed || kept.bytes > kMostBytes || thread_is_ending) return kept;
    Spares& spares = OfThisThread();
    for (Piece& piece : spares.pieces_) {
      if (piece.data == nullptr) return std::exchange(piece, kept);
    }
    spares.oldest_ = (spares.oldest_ + 1) % spares.pieces_.size();
    return std::exchange(spares.pieces_[spares.oldest_], kept);
  }

 private:
  static Spares& OfThisThread() {
    static thread_local Spares spares;
    return spares;
  }

  std::array<Piece, 8> pieces_;
  std::size_t oldest_ = 0;  // about
};

std::byte* Allocate(std::size_t bytes) {
  const std::size_t all = Spares::PieceBytes(bytes);
  if (std::byte* spare = Spares::Take(all); spare != nullptr) return spare;
  void* data = ::operator new(all, AlignmentOf(all));
#ifdef MADV_HUGEPAGE
  if (IsLarge(all)) madvise(data, all, MADV_HUGEPAGE);  // a wish: without it, all is as right
#endif
  return static_cast<std::byte*>(data);
}

void Free(std::byte* data, std::size_t bytes) {
#ifndef NDEBUG
  std::memset(data, 0xFF, bytes);
#endif
  const Spares::Piece freed = Spares::Keep({data, Spares::PieceBytes(bytes)});
  if (freed.data != nullptr) ::operator delete(freed.data, AlignmentOf(freed.bytes));
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
  if (data_ != nullptr) Free(data_, size());
}

TrackedBuffer::TrackedBuffer(TrackedBuffer&& other) noexcept { *this = std::move(other); }

TrackedBuffer& TrackedBuffer::operator=(TrackedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(counted_, other.counted_);
  return *this;
}

}  // namespace treeline
