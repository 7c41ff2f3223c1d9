#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "cli/problem.h"

namespace treeline::cli {

enum class Kernel : std::uint8_t { kDecode, kForward, kBackward, kMerge };
inline constexpr std::size_t kKernels = 4;
std::string_view Name(Kernel kernel);

// What products of attention are computed in. Sums are f32 in all.
enum class Arithmetic : std::uint8_t {
  kF32,
  kBf16,
  kToBf16,       // the same, of numbers that are not bf16 before
  kToTwoTerms,   // the same, queries and keys as sums of two of them
  kInt8Queries,  // scores in 8 bits, all else in f32
};

std::string_view Name(Arithmetic arithmetic);

// Of a kernel on such queries and keys. What a merge merges counts as computed by forward, or by
// decode if that is less exact.
Arithmetic ArithmeticOf(Kernel kernel, Isa isa, const AttentionSpec& spec, DType q, DType kv);

// What the machine can do of it at most, in operations a second; see limits.h.
double Peak(const Context& context, Arithmetic arithmetic);

// The largest error against the oracle that a kernel may have; see docs/numerics.md. That of a
// merge is of what it merges, too.
double Bound(Kernel kernel, Arithmetic arithmetic = Arithmetic::kF32);

// The kernel that Attend uses for a task.
Kernel KernelOf(const AttentionSpec& spec, const AttendTask& task);

// Error of each kernel, divided by the growth of the bound for large scores; negative where the
// shape does not use the kernel.
using Errors = std::array<double, kKernels>;

// Computes a shape with one instruction set after the other and compares with the oracle, which
// runs once: attention of each task; the same with the keys of each task dealt to `ranks` ranks in
// `layout` and merged, with sinks; and gradients where the types allow.
class Checker {
 public:
  Checker(const ProblemShape& shape, LayoutKind layout, int ranks);
  ~Checker();
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  Errors Run(const Context& context);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Case `index` of a sequence of random shapes: every type, storage and option, odd lengths first.
struct RandomCase {
  ProblemShape shape;
  LayoutKind layout;
  int ranks;
};
RandomCase MakeRandomCase(std::uint64_t seed, std::uint64_t index);

}  // namespace treeline::cli
