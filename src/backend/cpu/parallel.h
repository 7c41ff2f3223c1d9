#pragma once

#include <atomic>
#include <cstdint>

#include "treeline/context.h"
#include "treeline/thread_pool.h"

namespace treeline::cpu {

inline int Threads(const Context& context) {
  return context.pool == nullptr ? 1 : context.pool->threads();
}

// Calls body(item, thread) for every item in [0, items). Items are begun in order, by whichever
// thread is free. `body` must not throw.
template <class Body>
void ForEach(const Context& context, std::int64_t items, const Body& body) {
  if (context.pool == nullptr || items <= 1) {
    for (std::int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
  std::atomic<std::int64_t> next{0};
  context.pool->Run([&](int thread) {
    for (;;) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      body(item, thread);
    }
  });
}

}  // namespace treeline::cpu
