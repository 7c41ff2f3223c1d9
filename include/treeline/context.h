#pragma once

#include <optional>

#include "treeline/isa.h"

namespace treeline {

class MemoryTracker;
class ThreadPool;

// Called now and then by the thread that made a call, between two pieces of its work: messages can
// progress meanwhile. Must not throw. True ends the call early; its results are then undefined.
struct Poll {
  bool (*function)(void* argument) = nullptr;
  void* argument = nullptr;

  bool Stop() const { return function != nullptr && function(argument); }
};

// The resources a call may use. The default runs on the calling thread with the best kernels.
// A pool serves one call at a time.
struct Context {
  ThreadPool* pool = nullptr;       // null: the calling thread alone
  MemoryTracker* memory = nullptr;  // null: not counted
  std::optional<Isa> isa = {};      // empty: DefaultIsa()
  Poll poll = {};
};

}  // namespace treeline
