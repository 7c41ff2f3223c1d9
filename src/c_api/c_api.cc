#include "treeline/c_api.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "c_api/guard.h"
#include "core/check.h"
#include "treeline/attention.h"
#include "treeline/dtype.h"
#include "treeline/isa.h"
#include "treeline/memory.h"
#include "treeline/thread_pool.h"
#include "treeline/version.h"

// NOLINTBEGIN(readability-identifier-naming): C names

struct treeline_context {
  treeline_context(int threads, treeline::Isa isa_in_use)
      : pool(threads, Spin(threads)), isa(isa_in_use), isa_name(treeline::Name(isa_in_use)) {}

  // Threads that outnumber the cores would spin on a core that another one needs.
  static std::chrono::microseconds Spin(int threads) {
    const bool fits = static_cast<unsigned>(threads) <= std::thread::hardware_concurrency();
    return fits ? treeline::ThreadPool::kDefaultSpin : std::chrono::microseconds{0};
  }

  treeline::Context View() { return {.pool = &pool, .memory = &memory, .isa = isa}; }

  std::mutex in_use;  // a pool serves one call at a time
  treeline::ThreadPool pool;
  treeline::MemoryTracker memory;
  const treeline::Isa isa;
  const std::string isa_name;
};

namespace treeline::c_api {
namespace {

// Message of this thread's last error. Fixed in size: keeping an error cannot fail.
constexpr std::size_t kMessageBytes = 1024;
thread_local char last_error[kMessageBytes] = "";

void RequireNotNull(const void* pointer, std::string_view name) {
  Require(pointer != nullptr, name, " is null");
}

void RequireAligned(const void* pointer, std::string_view name, std::size_t alignment) {
  RequireNotNull(pointer, name);
  Require(reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0, name, " is at ", pointer,
          "; it must be aligned to ", alignment, " bytes");
}

// An array that may be null if it is empty.
template <class T>
std::span<T> ToSpan(T* data, std::size_t count, std::string_view name) {
  if (count > 0) RequireAligned(data, name, alignof(T));
  return {data, count};
}

DType ToDType(treeline_dtype dtype, std::string_view name) {
  switch (dtype) {
    case TREELINE_F32:
      return DType::kF32;
    case TREELINE_BF16:
      return DType::kBF16;
    case TREELINE_F16:
      return DType::kF16;
    case TREELINE_Q8_0:
      return DType::kQ8_0;
    default:
      Throw<ArgumentError>(name, " is ", dtype,
                           "; it must be TREELINE_F32, TREELINE_BF16, TREELINE_F16 or "
                           "TREELINE_Q8_0 (0 to 3)");
  }
}

std::size_t CheckedRowBytes(DType dtype, std::int32_t dim) {
  Require(dim >= 0, "dim is ", dim, "; it must not be negative");
  return RowBytes(dtype, dim);
}

// The counts are compared with heads, which is checked first, before anything is copied.
std::vector<float> ToPerHead(const float* values, std::size_t count, const AttentionSpec& spec,
                             std::string_view name) {
  Require(count == 0 || count == static_cast<std::size_t>(spec.heads), name, "_count is ", count,
          "; it must be 0 or heads (", spec.heads, ")");
  const std::span<const float> span = ToSpan(values, count, name);
  return {span.begin(), span.end()};
}

bool ToBool(std::int32_t value, const char* name) {
  Require(value == 0 || value == 1, name, " is ", value, "; it must be 0 or 1");
  return value == 1;
}

AttentionSpec ToSpec(const treeline_spec* spec) {
  RequireNotNull(spec, "spec");
  AttentionSpec result;
  result.heads = spec->heads;
  result.kv_heads = spec->kv_heads;
  result.head_dim = spec->head_dim;
  result.v_head_dim = spec->v_head_dim;
  result.scale = spec->scale;
  result.causal = ToBool(spec->causal, "causal");
  result.window = spec->window;
  result.softcap = spec->softcap;
  result.bf16_terms = spec->bf16_terms;
  result.int8_queries = ToBool(spec->int8_queries, "int8_queries");
  Validate(result);
  result.alibi_slopes =
      ToPerHead(spec->alibi_slopes, spec->alibi_slopes_count, result, "alibi_slopes");
  result.sinks = ToPerHead(spec->sinks, spec->sinks_count, result, "sinks");
  Validate(result);
  return result;
}

Positions::Segment ToSegment(const treeline_segment& segment) {
  if (segment.count == 0) return {};
  return {segment.first, segment.run, segment.stride, segment.count};
}

Positions ToPositions(const treeline_positions& positions, const std::string& name) {
  try {
    return Positions::Joined(ToSegment(positions.segments[0]), ToSegment(positions.segments[1]));
  } catch (const ArgumentError& e) {
    throw ArgumentError(name + ": " + e.what());
  }
}

TensorView ToTensor(const treeline_tensor& tensor, const std::string& name) {
  return {.data = tensor.data,
          .dtype = ToDType(tensor.dtype, name + ".dtype"),
          .tokens = tensor.tokens,
          .heads = tensor.heads,
          .dim = tensor.dim,
          .token_stride = tensor.token_stride,
          .head_stride = tensor.head_stride};
}

GradView ToGradient(const treeline_gradient& gradient) {
  return {.data = gradient.data,
          .tokens = gradient.tokens,
          .heads = gradient.heads,
          .dim = gradient.dim,
          .token_stride = gradient.token_stride,
          .head_stride = gradient.head_stride};
}

KvSide ToSide(const treeline_kv_side& side, int dim, const treeline_kv& kv,
              const std::string& name) {
  if (kv.page_slots == 0) {
    Require(side.pages == nullptr, name, ".pages is set but page_slots is 0, which means strided");
  } else {
    Require(side.base == nullptr, name, ".base is set but page_slots is ", kv.page_slots,
            ", which means paged");
    if (kv.slots > 0) RequireAligned(side.pages, name + ".pages", alignof(const void*));
  }
  return {side.base, side.pages, side.slot_stride, side.head_stride, dim};
}

// Page counts are checked here: a KvView does not hold them.
KvView ToKv(const treeline_kv& kv, const std::string& name) {
  Require(kv.page_slots >= 0, name, ".page_slots is ", kv.page_slots,
          "; it must be 0 (strided) or positive");
  if (kv.page_slots > 0 && kv.slots > 0) {
    const std::int64_t needed = (kv.slots - 1) / kv.page_slots + 1;
    Require(kv.page_count >= needed, name, ".page_count is ", kv.page_count, "; ", kv.slots,
            " slots need ", needed, " pages of ", kv.page_slots);
  }
  return {.k = ToSide(kv.k, kv.head_dim, kv, name + ".k"),
          .v = ToSide(kv.v, kv.v_head_dim, kv, name + ".v"),
          .dtype = ToDType(kv.dtype, name + ".dtype"),
          .slots = kv.slots,
          .page_slots = kv.page_slots,
          .kv_heads = kv.kv_heads};
}

Partial ToPartial(const treeline_partial& partial, const std::string& name) {
  constexpr std::int64_t kMaxValues =
      std::numeric_limits<std::ptrdiff_t>::max() / static_cast<std::ptrdiff_t>(sizeof(float));
  std::int64_t values = 0;
  Require(partial.rows >= 0, name, ".rows is ", partial.rows, "; it must not be negative");
  Require(partial.v_head_dim >= 0, name, ".v_head_dim is ", partial.v_head_dim,
          "; it must not be negative");
  Require(!__builtin_mul_overflow(partial.rows, std::int64_t{partial.v_head_dim}, &values) &&
              values <= kMaxValues && partial.rows <= kMaxValues,
          name, " has ", partial.rows, " rows of ", partial.v_head_dim, ": too large to address");
  return {ToSpan(partial.out, static_cast<std::size_t>(values), name + ".out"),
          ToSpan(partial.lse, static_cast<std::size_t>(partial.rows), name + ".lse"),
          partial.v_head_dim};
}

AttendTask ToAttendTask(const treeline_attend_task& task, const std::string& name) {
  return {.q = ToTensor(task.q, name + ".q"),
          .q_positions = ToPositions(task.q_positions, name + ".q_positions"),
          .kv = ToKv(task.kv, name + ".kv"),
          .kv_positions = ToPositions(task.kv_positions, name + ".kv_positions"),
          .result = ToPartial(task.result, name + ".result")};
}

BackwardTask ToBackwardTask(const treeline_backward_task& task, const std::string& name) {
  return {.q = ToTensor(task.q, name + ".q"),
          .q_positions = ToPositions(task.q_positions, name + ".q_positions"),
          .kv = ToKv(task.kv, name + ".kv"),
          .kv_positions = ToPositions(task.kv_positions, name + ".kv_positions"),
          .out = ToTensor(task.out, name + ".out"),
          .d_out = ToTensor(task.d_out, name + ".d_out"),
          .lse = ToSpan(task.lse, task.lse_count, name + ".lse"),
          .dq = ToGradient(task.dq),
          .dk = ToGradient(task.dk),
          .dv = ToGradient(task.dv)};
}

// Converts every element of an array, calling it name[i] in errors.
template <class T, class Convert>
auto ToVector(const T* items, std::size_t count, const std::string& name, const Convert& convert) {
  std::vector<decltype(convert(*items, name))> result;
  const std::span<const T> span = ToSpan(items, count, name);
  result.reserve(count);
  for (const T& item : span) {
    result.push_back(convert(item, name + "[" + std::to_string(result.size()) + "]"));
  }
  return result;
}

// RowBytes for views that are not checked yet: 0, which no view accepts as a stride, where there is
// no such row.
std::int64_t RowBytesOrZero(treeline_dtype dtype, std::int32_t dim) noexcept {
  if (dim < 0 || dtype < TREELINE_F32 || dtype > TREELINE_Q8_0) return 0;
  return static_cast<std::int64_t>(RowBytes(ToDType(dtype, "dtype"), dim));
}

std::int64_t ProductOrZero(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? 0 : product;
}

}  // namespace

treeline_status Fail(treeline_status status, const char* message) noexcept {
  const std::size_t length = strnlen(message, kMessageBytes - 1);
  std::memcpy(last_error, message, length);
  last_error[length] = '\0';
  return status;
}

}  // namespace treeline::c_api

using namespace treeline;
using namespace treeline::c_api;

const char* treeline_version(void) { return treeline::Version().data(); }

const char* treeline_last_error(void) { return last_error; }

treeline_status treeline_context_create(int32_t abi_version, int32_t threads, const char* isa,
                                        treeline_context** context) {
  return Guard([&] {
    RequireNotNull(context, "context");
    Require(abi_version == TREELINE_ABI_VERSION, "abi_version is ", abi_version,
            "; this library has ", TREELINE_ABI_VERSION);
    const Isa isa_in_use = isa == nullptr ? DefaultIsa() : ParseIsa(isa);
    *context = std::make_unique<treeline_context>(threads, isa_in_use).release();
  });
}

void treeline_context_destroy(treeline_context* context) { delete context; }

treeline_status treeline_context_isa(treeline_context* context, const char** isa) {
  return Guard([&] {
    RequireNotNull(context, "context");
    RequireNotNull(isa, "isa");
    *isa = context->isa_name.c_str();
  });
}

treeline_status treeline_context_peak_bytes(treeline_context* context, size_t* bytes) {
  return Guard([&] {
    RequireNotNull(context, "context");
    RequireNotNull(bytes, "bytes");
    *bytes = context->memory.peak();
  });
}

treeline_status treeline_context_reset_peak(treeline_context* context) {
  return Guard([&] {
    RequireNotNull(context, "context");
    const std::lock_guard lock(context->in_use);
    context->memory.ResetPeaks();
  });
}

treeline_status treeline_row_bytes(treeline_dtype dtype, int32_t dim, size_t* bytes) {
  return Guard([&] {
    RequireNotNull(bytes, "bytes");
    *bytes = CheckedRowBytes(ToDType(dtype, "dtype"), dim);
  });
}

treeline_status treeline_encode_row(treeline_dtype dtype, const float* source, int32_t dim,
                                    void* row) {
  return Guard([&] {
    const DType type = ToDType(dtype, "dtype");
    CheckedRowBytes(type, dim);
    RequireAligned(source, "source", alignof(float));
    RequireAligned(row, "row", Alignment(type));
    EncodeRow(type, {source, static_cast<std::size_t>(dim)}, row);
  });
}

treeline_status treeline_decode_row(treeline_dtype dtype, const void* row, int32_t dim,
                                    float* target) {
  return Guard([&] {
    const DType type = ToDType(dtype, "dtype");
    CheckedRowBytes(type, dim);
    RequireAligned(row, "row", Alignment(type));
    RequireAligned(target, "target", alignof(float));
    DecodeRow(type, row, {target, static_cast<std::size_t>(dim)});
  });
}

treeline_status treeline_spec_init(treeline_spec* spec, int32_t heads, int32_t kv_heads,
                                   int32_t head_dim) {
  return Guard([&] {
    RequireNotNull(spec, "spec");
    const AttentionSpec usual = AttentionSpec::Make(heads, kv_heads, head_dim);
    Validate(usual);
    *spec = {.heads = usual.heads,
             .kv_heads = usual.kv_heads,
             .head_dim = usual.head_dim,
             .v_head_dim = usual.v_head_dim,
             .scale = usual.scale,
             .softcap = usual.softcap,
             .window = usual.window,
             .causal = usual.causal ? 1 : 0,
             .alibi_slopes = nullptr,
             .alibi_slopes_count = 0,
             .sinks = nullptr,
             .sinks_count = 0,
             .bf16_terms = usual.bf16_terms,
             .int8_queries = usual.int8_queries ? 1 : 0};
  });
}

treeline_tensor treeline_tensor_dense(const void* data, treeline_dtype dtype, int64_t tokens,
                                      int32_t heads, int32_t dim) {
  const std::int64_t row = RowBytesOrZero(dtype, dim);
  return {.data = data,
          .tokens = tokens,
          .token_stride = ProductOrZero(row, heads),
          .head_stride = row,
          .heads = heads,
          .dim = dim,
          .dtype = dtype};
}

treeline_gradient treeline_gradient_dense(float* data, int64_t tokens, int32_t heads, int32_t dim) {
  const std::int64_t row = RowBytesOrZero(TREELINE_F32, dim);
  return {.data = data,
          .tokens = tokens,
          .token_stride = ProductOrZero(row, heads),
          .head_stride = row,
          .heads = heads,
          .dim = dim};
}

treeline_kv treeline_kv_dense(const void* k, const void* v, treeline_dtype dtype, int64_t slots,
                              int32_t kv_heads, int32_t head_dim, int32_t v_head_dim) {
  const std::int64_t k_row = RowBytesOrZero(dtype, head_dim);
  const std::int64_t v_row = RowBytesOrZero(dtype, v_head_dim);
  return {.k = {k, nullptr, ProductOrZero(k_row, kv_heads), k_row},
          .v = {v, nullptr, ProductOrZero(v_row, kv_heads), v_row},
          .slots = slots,
          .page_slots = 0,
          .page_count = 0,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .v_head_dim = v_head_dim,
          .dtype = dtype};
}

treeline_kv treeline_kv_paged(const void* const* k_pages, const void* const* v_pages,
                              int64_t page_count, treeline_dtype dtype, int64_t slots,
                              int64_t page_slots, int32_t kv_heads, int32_t head_dim,
                              int32_t v_head_dim) {
  const std::int64_t k_row = RowBytesOrZero(dtype, head_dim);
  const std::int64_t v_row = RowBytesOrZero(dtype, v_head_dim);
  return {.k = {nullptr, k_pages, k_row, ProductOrZero(k_row, page_slots)},
          .v = {nullptr, v_pages, v_row, ProductOrZero(v_row, page_slots)},
          .slots = slots,
          .page_slots = page_slots,
          .page_count = page_count,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .v_head_dim = v_head_dim,
          .dtype = dtype};
}

treeline_positions treeline_positions_contiguous(int64_t first, int64_t count) {
  const std::int64_t run = count > 0 ? count : 1;
  return {{{first, run, run, count}, {0, 1, 1, 0}}};
}

treeline_status treeline_attend(treeline_context* context, const treeline_spec* spec,
                                const treeline_attend_task* tasks, size_t task_count) {
  return Guard([&] {
    RequireNotNull(context, "context");
    const AttentionSpec attention = ToSpec(spec);
    const auto list = ToVector(tasks, task_count, "tasks", ToAttendTask);
    const std::lock_guard lock(context->in_use);
    Attend(attention, list, context->View());
  });
}

treeline_status treeline_merge(treeline_context* context, const treeline_partial* parts,
                               size_t part_count, const treeline_partial* target) {
  return Guard([&] {
    RequireNotNull(context, "context");
    RequireNotNull(target, "target");
    const auto list = ToVector(parts, part_count, "parts", ToPartial);
    const std::lock_guard lock(context->in_use);
    Merge(list, ToPartial(*target, "target"), context->View());
  });
}

treeline_status treeline_apply_sinks(const treeline_spec* spec, const treeline_partial* partial) {
  return Guard([&] {
    const AttentionSpec attention = ToSpec(spec);
    RequireNotNull(partial, "partial");
    ApplySinks(attention, ToPartial(*partial, "partial"));
  });
}

treeline_status treeline_attend_backward(treeline_context* context, const treeline_spec* spec,
                                         const treeline_backward_task* tasks, size_t task_count) {
  return Guard([&] {
    RequireNotNull(context, "context");
    const AttentionSpec attention = ToSpec(spec);
    const auto list = ToVector(tasks, task_count, "tasks", ToBackwardTask);
    const std::lock_guard lock(context->in_use);
    AttendBackward(attention, list, context->View());
  });
}

treeline_status treeline_sinks_backward(const treeline_spec* spec, const treeline_tensor* out,
                                        const treeline_tensor* d_out, const float* lse,
                                        size_t lse_count, float* d_sinks, size_t d_sinks_count) {
  return Guard([&] {
    const AttentionSpec attention = ToSpec(spec);
    RequireNotNull(out, "out");
    RequireNotNull(d_out, "d_out");
    SinksBackward(attention, ToTensor(*out, "out"), ToTensor(*d_out, "d_out"),
                  ToSpan(lse, lse_count, "lse"), ToSpan(d_sinks, d_sinks_count, "d_sinks"));
  });
}

// NOLINTEND(readability-identifier-naming)
