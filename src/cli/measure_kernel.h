#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cli/check.h"
#include "cli/problem.h"
#include "treeline/thread_pool.h"

namespace treeline::cli {

// A kernel and the shape that it is timed with.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding): tables give fields in this order
struct BenchCase {
  Kernel kernel;
  DType dtype = DType::kF32;
  Storage storage = Storage::kDense;
  std::int64_t context = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int batch = 1;  // sequences, one after the other in memory; merge: partials
  const char* note = "";
  bool int8_queries = false;
};

// What was measured of a case.
struct Measurement {
  std::vector<double> seconds;
  std::vector<double> fractions;  // of the limit, measured next to each time
  double work = 0.0;              // bytes or floating-point operations
  double max_error = 0.0;
  double bound = 0.0;
  std::size_t peak_bytes = 0;
};

// Times a case `repeats` times, alternating with its limit, and checks the result.
Measurement MeasureCase(const BenchCase& c, int repeats, std::uint64_t seed, ThreadPool& pool);

}  // namespace treeline::cli
