#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "treeline/isa.h"

namespace treeline::cli {

struct Cache {
  int level;
  std::size_t bytes;
  int count;  // on the whole machine
};

// What a report says about where it was made.
struct Machine {
  std::string cpu;
  int cores = 0;  // that this process may use
  std::vector<Cache> caches;
  std::vector<Isa> isas;  // attainable, best last
  std::string version;    // of treeline
  std::string commit;
  std::string compiler;
};

Machine DescribeMachine();

}  // namespace treeline::cli
