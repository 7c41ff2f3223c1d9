#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace treeline::cli {

struct VerifyRanksOptions {
  std::vector<int> ranks;
  std::uint64_t cases = 0;
  std::uint64_t seed = 1;
  int threads = 1;  // of a rank
  std::chrono::milliseconds timeout{60'000};
  std::string json;
};

// Every schedule and layout, forward and backward, on random shapes and options over ranks, against
// the oracle. Throws CheckFailure if one is beyond its bound, or ranks hold different bits.
void VerifyRanks(const VerifyRanksOptions& options);

}  // namespace treeline::cli
