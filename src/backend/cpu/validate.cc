#include "backend/cpu/validate.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "core/check.h"

namespace treeline::cpu {
namespace {

// Kernels index tiles with 32 bits and bytes with 64.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max() / 2;

// A strided array of rows: `outer` x `inner` rows of `row_bytes`.
struct Rows {
  const void* data;
  std::int64_t count;
  int heads;
  std::int64_t row_bytes;
  std::int64_t token_stride;
  std::int64_t head_stride;
  std::size_t alignment;
};

// (count - 1) * stride + size, or -1 if that is too large.
std::int64_t Extent(std::int64_t count, std::int64_t stride, std::int64_t size) {
  std::int64_t steps = 0;
  std::int64_t total = 0;
  if (__builtin_mul_overflow(count - 1, stride, &steps) ||
      __builtin_add_overflow(steps, size, &total) || total > kMaxBytes) {
    return -1;
  }
  return total;
}

void RequireAligned(const std::string& name, const void* data, std::size_t alignment) {
  Require(data != nullptr, name, " is null");
  Require(reinterpret_cast<std::uintptr_t>(data) % alignment == 0, name, " is at ", data,
          "; it must be aligned to ", alignment, " bytes");
}

void RequireStride(const std::string& name, std::int64_t stride, const Rows& rows) {
  Require(stride >= rows.row_bytes, name, " is ", stride,
          " bytes; rows overlap unless it is at least ", rows.row_bytes);
  Require(stride % static_cast<std::int64_t>(rows.alignment) == 0, name, " is ", stride,
          " bytes; it must be a multiple of ", rows.alignment);
}

// Rows must not overlap, in whichever order the two dimensions are nested.
void RequireRows(const std::string& name, const Rows& rows) {
  Require(rows.count >= 0 && rows.count <= kMaxTokens, name, " has ", rows.count,
          " tokens; it must have 0 to ", kMaxTokens);
  if (rows.count == 0) return;
  if (rows.count > 1) RequireStride(name + "'s token stride", rows.token_stride, rows);
  if (rows.heads > 1) RequireStride(name + "'s head stride", rows.head_stride, rows);
  const std::int64_t by_head = Extent(rows.heads, rows.head_stride, rows.row_bytes);
  const std::int64_t by_token = Extent(rows.count, rows.token_stride, rows.row_bytes);
  Require(by_head > 0 && by_token > 0 && Extent(rows.count, rows.token_stride, by_head) > 0, name,
          " has ", rows.count, " tokens ", rows.token_stride, " bytes apart and ", rows.heads,
          " heads ", rows.head_stride, " bytes apart: too large to address");
  const bool heads_inside = rows.count == 1 || rows.token_stride >= by_head;
  const bool tokens_inside = rows.heads == 1 || rows.head_stride >= by_token;
  Require(heads_inside || tokens_inside, name, " has ", rows.heads, " heads ", rows.head_stride,
          " bytes apart and tokens ", rows.token_stride, " bytes apart: rows overlap");
}

void RequireShape(const std::string& name, int heads, int dim, int want_heads, int want_dim) {
  Require(heads == want_heads, name, " has ", heads, " heads; the spec has ", want_heads);
  Require(dim == want_dim, name, " has dim ", dim, "; the spec has ", want_dim);
}

void RequireTensor(const std::string& name, const TensorView& view, int heads, int dim) {
  RequireShape(name, view.heads, view.dim, heads, dim);
  RequireRows(name, {view.data, view.tokens, view.heads,
                     static_cast<std::int64_t>(RowBytes(view.dtype, view.dim)), view.token_stride,
                     view.head_stride, Alignment(view.dtype)});
  if (view.tokens > 0) RequireAligned(name, view.data, Alignment(view.dtype));
}

void RequireGrad(const std::string& name, const GradView& view, std::int64_t tokens, int heads,
                 int dim) {
  RequireShape(name, view.heads, view.dim, heads, dim);
  Require(view.tokens == tokens, name, " has ", view.tokens, " tokens; it must have ", tokens);
  RequireRows(name, {view.data, view.tokens, view.heads,
                     std::int64_t{view.dim} * static_cast<std::int64_t>(sizeof(float)),
                     view.token_stride, view.head_stride, alignof(float)});
  if (view.tokens > 0) RequireAligned(name, view.data, alignof(float));
}

void RequireSide(const std::string& name, const KvView& kv, const KvSide& side, int dim) {
  const std::size_t alignment = Alignment(kv.dtype);
  Require(side.dim == dim, name, " has dim ", side.dim, "; the spec has ", dim);
  Require(side.pages == nullptr || kv.page_slots >= 1, name, " is paged with page_slots ",
          kv.page_slots, "; it must be positive");
  const std::int64_t in_page = side.pages == nullptr ? kv.slots : std::min(kv.slots, kv.page_slots);
  RequireRows(name,
              {side.base, in_page, kv.kv_heads, static_cast<std::int64_t>(RowBytes(kv.dtype, dim)),
               side.slot_stride, side.head_stride, alignment});
  if (kv.slots == 0) return;
  if (side.pages == nullptr) {
    RequireAligned(name, side.base, alignment);
    return;
  }
  for (std::int64_t page = 0; page <= (kv.slots - 1) / kv.page_slots; ++page) {
    RequireAligned(name + "'s page " + std::to_string(page), side.pages[page], alignment);
  }
}

void RequireKv(const std::string& name, const AttentionSpec& spec, const KvView& kv,
               const Positions& positions) {
  Require(kv.kv_heads == spec.kv_heads, name, " has ", kv.kv_heads, " heads; the spec has ",
          spec.kv_heads);
  Require(kv.slots >= 0 && kv.slots <= kMaxTokens, name, " has ", kv.slots,
          " slots; it must have 0 to ", kMaxTokens);
  Require(positions.count() == kv.slots, name, " has ", kv.slots, " slots and ", positions.count(),
          " positions; they must be the same");
  RequireSide(name + ".k", kv, kv.k, spec.head_dim);
  RequireSide(name + ".v", kv, kv.v, spec.v_head_dim);
}

void RequireQuery(const std::string& name, const AttentionSpec& spec, const TensorView& q,
                  const Positions& positions) {
  Require(q.dtype != DType::kQ8_0, name, " is q8_0; queries are f32, bf16 or f16");
  RequireTensor(name, q, spec.heads, spec.head_dim);
  Require(positions.count() == q.tokens, name, " has ", q.tokens, " tokens and ", positions.count(),
          " positions; they must be the same");
}

std::string TaskName(std::size_t index) { return "task " + std::to_string(index) + ": "; }

}  // namespace

void ValidateOutput(std::string_view name, const AttentionSpec& spec, const TensorView& view,
                    std::int64_t tokens) {
  Require(view.dtype == DType::kF32, name, " is ", Name(view.dtype), "; it must be f32");
  Require(view.tokens == tokens, name, " has ", view.tokens, " tokens; it must have ", tokens);
  RequireTensor(std::string(name), view, spec.heads, spec.v_head_dim);
}

void ValidateTask(const AttentionSpec& spec, const AttendTask& task, std::size_t index) {
  const std::string prefix = TaskName(index);
  RequireQuery(prefix + "q", spec, task.q, task.q_positions);
  RequireKv(prefix + "kv", spec, task.kv, task.kv_positions);
  const auto rows = static_cast<std::size_t>(task.q.tokens) * static_cast<std::size_t>(spec.heads);
  const auto dim = static_cast<std::size_t>(spec.v_head_dim);
  Require(task.result.v_head_dim == spec.v_head_dim, prefix, "result has v_head_dim ",
          task.result.v_head_dim, "; the spec has ", spec.v_head_dim);
  Require(task.result.lse.size() == rows, prefix, "result.lse has ", task.result.lse.size(),
          " values; it must have ", rows);
  Require(task.result.out.size() == rows * dim, prefix, "result.out has ", task.result.out.size(),
          " values; it must have ", rows * dim);
  if (rows == 0) return;
  RequireAligned(prefix + "result.out", task.result.out.data(), alignof(float));
  RequireAligned(prefix + "result.lse", task.result.lse.data(), alignof(float));
}

void ValidateTask(const AttentionSpec& spec, const BackwardTask& task, std::size_t index) {
  const std::string prefix = TaskName(index);
  RequireQuery(prefix + "q", spec, task.q, task.q_positions);
  RequireKv(prefix + "kv", spec, task.kv, task.kv_positions);
  Require(task.kv.dtype != DType::kQ8_0, prefix, "kv is q8_0; gradients need f32, bf16 or f16");
  ValidateOutput(prefix + "out", spec, task.out, task.q.tokens);
  ValidateOutput(prefix + "d_out", spec, task.d_out, task.q.tokens);
  const auto rows = static_cast<std::size_t>(task.q.tokens) * static_cast<std::size_t>(spec.heads);
  Require(task.lse.size() == rows, prefix, "lse has ", task.lse.size(), " values; it must have ",
          rows);
  if (rows > 0) RequireAligned(prefix + "lse", task.lse.data(), alignof(float));
  RequireGrad(prefix + "dq", task.dq, task.q.tokens, spec.heads, spec.head_dim);
  RequireGrad(prefix + "dk", task.dk, task.kv.slots, spec.kv_heads, spec.head_dim);
  RequireGrad(prefix + "dv", task.dv, task.kv.slots, spec.kv_heads, spec.v_head_dim);
}

}  // namespace treeline::cpu
