#pragma once

#include <optional>

#include "treeline/isa.h"

namespace treeline {

class MemoryTracker;
class ThreadPool;

// The resources a call may use. The default runs on the calling thread with the best kernels.
// A pool serves one call at a time.
struct Context {
  ThreadPool* pool = nullptr;       // null: the calling thread alone
  MemoryTracker* memory = nullptr;  // null: not counted
  std::optional<Isa> isa = {};      // empty: DefaultIsa()
};

}  // namespace treeline
