#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "treeline/attention.h"

namespace treeline::cli {

// How keys and values lie in memory.
enum class Storage : std::uint8_t {
  kDense,   // [slot, kv_head, dim], rows one after the other
  kPadded,  // the same with gaps between rows
  kPaged,   // pages of [kv_head, slot, dim], in shuffled order
};

std::string_view Name(Storage storage);

// A batch of random sequences to compute, verify or time.
struct ProblemShape {
  struct Sequence {
    Positions q_positions;
    Positions kv_positions;
  };

  AttentionSpec spec;
  DType q_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  Storage storage = Storage::kDense;
  std::int64_t page_slots = 16;
  std::vector<Sequence> sequences;
  float magnitude = 1.0f;  // of queries; K and V are N(0, 1)
  std::uint64_t seed = 0;

  // One line that tells everything needed to understand a failure.
  std::string Describe() const;
};

// Bytes that are never read if the kernels are right: NaN in every type.
inline constexpr std::byte kPoison{0xFF};

// A block of memory on huge pages where the system gives them, as a cache would be.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  // Filled with kPoison. The system may take seconds to give much memory: pause() comes after
  // every kPiece bytes, or part of it. Throws std::bad_alloc.
  static constexpr std::size_t kPiece = std::size_t{32} << 20;
  explicit HugeBuffer(
      std::size_t bytes, const std::function<void()>& pause = [] {});
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Inputs and outputs of a shape. All that is not a row of an input is poisoned.
class Problem {
 public:
  explicit Problem(const ProblemShape& shape);
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const AttentionSpec& spec() const { return shape_.spec; }
  const ProblemShape& shape() const { return shape_; }
  const std::vector<AttendTask>& tasks() const { return tasks_; }

  // Keys and values of all sequences, for reading at the limit.
  const HugeBuffer& kv_memory() const { return kv_; }
  // Without gaps.
  std::size_t kv_bytes() const { return kv_bytes_; }
  // Query-key pairs that are visible, over all heads.
  std::int64_t pairs() const;

  // Poisons results, so that a row that is not written shows.
  void ClearResults();

  // The backward tasks of the same sequences, from the results as they are now and random d_out;
  // gradients start at 0.
  const std::vector<BackwardTask>& MakeBackward();

 private:
  struct SequenceMemory {
    std::vector<std::byte> q;
    std::vector<const void*> k_pages;
    std::vector<const void*> v_pages;
    std::vector<float> out;
    std::vector<float> lse;
    std::vector<float> d_out;
    std::vector<float> dq;
    std::vector<float> dk;
    std::vector<float> dv;
  };

  ProblemShape shape_;
  HugeBuffer kv_;
  std::size_t kv_bytes_ = 0;
  std::vector<SequenceMemory> memory_;
  std::vector<AttendTask> tasks_;
  std::vector<BackwardTask> backward_;
};

}  // namespace treeline::cli
