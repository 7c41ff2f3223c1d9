#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace treeline {

// What tracked memory is for.
enum class Purpose : std::uint8_t { kShard, kInFlight, kWorkspace, kResult };
inline constexpr std::size_t kPurposes = 4;

// Counts bytes that are held and their peak, by purpose. Thread-safe.
class MemoryTracker {
 public:
  void Add(Purpose purpose, std::size_t bytes);
  void Remove(Purpose purpose, std::size_t bytes);

  std::size_t held(Purpose purpose) const;
  std::size_t peak(Purpose purpose) const;
  // The highest sum over all purposes at one time.
  std::size_t peak() const;

  // Peaks start again from what is held now. Not to be called while others allocate.
  void ResetPeaks();

 private:
  struct Counter {
    std::atomic<std::size_t> held{0};
    std::atomic<std::size_t> peak{0};
    void Add(std::size_t bytes);
  };
  std::array<Counter, kPurposes> counters_;
  Counter total_;
};

// Counts bytes while it lives. The memory itself is somebody else's.
class TrackedBytes {
 public:
  TrackedBytes() = default;
  // `tracker` may be null, and outlives this.
  TrackedBytes(std::size_t bytes, Purpose purpose, MemoryTracker* tracker);
  ~TrackedBytes();
  TrackedBytes(TrackedBytes&& other) noexcept;
  TrackedBytes& operator=(TrackedBytes&& other) noexcept;

  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
  Purpose purpose_ = Purpose::kWorkspace;
  MemoryTracker* tracker_ = nullptr;
};

// 64-byte aligned memory, counted while it lives. The contents are uninitialised.
class TrackedBuffer {
 public:
  TrackedBuffer() = default;
  // As TrackedBytes. Throws std::bad_alloc.
  TrackedBuffer(std::size_t bytes, Purpose purpose, MemoryTracker* tracker);
  ~TrackedBuffer();
  TrackedBuffer(TrackedBuffer&& other) noexcept;
  TrackedBuffer& operator=(TrackedBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t size() const { return counted_.size(); }

 private:
  std::byte* data_ = nullptr;
  TrackedBytes counted_;
};

}  // namespace treeline
