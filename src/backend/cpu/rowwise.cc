#include "backend/cpu/rowwise.h"

#include <algorithm>

#include "backend/cpu/parallel.h"
#include "kernels/cpu/kernel_table.h"

namespace treeline::cpu {
namespace {

// Rows of few tokens are not worth waking threads for.
template <class Body>
void ForEachToken(const Context& context, std::int64_t tokens, const Body& body) {
  constexpr std::int64_t kBlock = 16;
  ForEach(context, (tokens + kBlock - 1) / kBlock, [&](std::int64_t block, int) {
    const std::int64_t end = std::min(tokens, (block + 1) * kBlock);
    for (std::int64_t t = block * kBlock; t < end; ++t) body(t);
  });
}

}  // namespace

void RmsNorm(const Context& context, const float* x, const float* weight, std::int64_t tokens,
             int n, float epsilon, float* out) {
  const KernelTable& table = TableFor(context);
  ForEachToken(context, tokens,
               [&](std::int64_t t) { table.rms_norm(x + t * n, weight, n, epsilon, out + t * n); });
}

void Rotate(const Context& context, const Rotation& rotation, float* x, std::int64_t stride,
            std::int64_t tokens, int heads, int head_dim) {
  const KernelTable& table = TableFor(context);
  ForEachToken(context, tokens, [&](std::int64_t t) {
    table.rotate({.x = x + t * stride,
                  .heads = heads,
                  .head_dim = head_dim,
                  .pairs = rotation.pairs,
                  .cosines = rotation.cosines + t * rotation.pairs,
                  .sines = rotation.sines + t * rotation.pairs});
  });
}

void SwiGlu(const Context& context, float* gate, const float* up, std::int64_t tokens, int n) {
  const KernelTable& table = TableFor(context);
  ForEachToken(context, tokens, [&](std::int64_t t) { table.swiglu(gate + t * n, up + t * n, n); });
}

}  // namespace treeline::cpu
