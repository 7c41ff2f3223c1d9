#pragma once

#include <atomic>
#include <cstdint>

#include "treeline/context.h"
#include "treeline/thread_pool.h"

namespace treeline::cpu {

inline int Threads(const Context& context) {
  return context.pool == nullptr ? 1 : context.pool->threads();
}

// Calls body(item, thread) for every item in [0, items), unless the context's poll says stop. Items
// are begun in order, by whichever thread is free; those that have begun are finished. `body` must
// not throw.
template <class Body>
void ForEach(const Context& context, std::int64_t items, const Body& body) {
  if (context.pool == nullptr || items <= 1) {
    for (std::int64_t item = 0; item < items; ++item) {
      if (context.poll.Stop()) return;
      body(item, 0);
    }
    return;
  }
  std::atomic<std::int64_t> next{0};
  context.pool->Run([&](int thread) {
    for (;;) {
      if (thread == 0 && context.poll.Stop()) next.store(items, std::memory_order_relaxed);
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      body(item, thread);
    }
  });
}

}  // namespace treeline::cpu
