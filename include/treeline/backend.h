#pragma once

#include <cstdint>
#include <span>

#include "treeline/attention.h"
#include "treeline/memory.h"

namespace treeline {

// What a device can do for one rank. Schedules see only this and a Communicator.
class Backend {
 public:
  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // Memory that the device and the communicator can reach, counted for this rank.
  virtual TrackedBuffer Allocate(std::size_t bytes, Purpose purpose) = 0;

  // As the functions of the same names.
  virtual void Attend(const AttentionSpec& spec, std::span<const AttendTask> tasks) = 0;
  virtual void AttendBackward(const AttentionSpec& spec, std::span<const BackwardTask> tasks) = 0;

  // Attention over each class of a task's slots apart: slot i is of class i % classes. `parts`
  // holds a partial for each class, [rows, v_head_dim] out, then [rows] lse; the task's result is
  // not touched. The bits of a class depend on its keys alone: not on the other classes, nor on
  // threads.
  virtual void AttendClasses(const AttentionSpec& spec, const AttendTask& task, int classes,
                             std::span<float> parts) = 0;

  virtual void Merge(std::span<const Partial> parts, const Partial& target) = 0;

  // target[i] += source[i].
  virtual void Add(std::span<float> target, std::span<const float> source) = 0;

  // Visible pairs of a query row and a key, over all heads, that were attended to so far.
  virtual std::int64_t pairs() const = 0;
};

// The CPU, with the resources of a context.
class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const Context& context = {}) : context_(context) {}

  TrackedBuffer Allocate(std::size_t bytes, Purpose purpose) override;
  void Attend(const AttentionSpec& spec, std::span<const AttendTask> tasks) override;
  void AttendBackward(const AttentionSpec& spec, std::span<const BackwardTask> tasks) override;
  void AttendClasses(const AttentionSpec& spec, const AttendTask& task, int classes,
                     std::span<float> parts) override;
  void Merge(std::span<const Partial> parts, const Partial& target) override;
  void Add(std::span<float> target, std::span<const float> source) override;
  std::int64_t pairs() const override { return pairs_; }

 private:
  const Context context_;
  std::int64_t pairs_ = 0;
};

}  // namespace treeline
