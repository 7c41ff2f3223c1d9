#pragma once

#include <stddef.h>
#include <stdint.h>

// Treeline from C99, and from every language that can call C: attention.h, partial.h and dtype.h
// without C++.
//
// Errors. A function that can fail returns a status, and treeline_last_error() says more: for an
// argument, which one is wrong and what is allowed. After TREELINE_ERROR_ARGUMENT nothing has been
// written. No call throws, prints, exits or aborts.
// Memory. Structs and what they point to are borrowed for the time of a call; the library keeps no
// pointer. Pointers must not be null unless a comment says so. Memory that is written must not
// overlap anything else that the call is given.
// Threads. Every function may be called from any thread.
// ABI. Enumerations are 32 bits wide. Structs and constants change only together with
// TREELINE_ABI_VERSION.

// NOLINTBEGIN(readability-identifier-naming): C names

#if defined(__GNUC__)
#define TREELINE_C_API __attribute__((visibility("default")))
#else
#define TREELINE_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TREELINE_ABI_VERSION 2

// Version of the library, as "0.1.0".
TREELINE_C_API const char* treeline_version(void);

typedef int32_t treeline_status;
enum {
  TREELINE_OK = 0,
  TREELINE_ERROR_ARGUMENT = 1,  // the caller can fix it
  TREELINE_ERROR_COMM = 2,      // a peer failed or did not answer in time
  TREELINE_ERROR_FORMAT = 3,    // a file is not what it claims to be
  TREELINE_ERROR_DEVICE = 4,    // a device or the system failed, or lacks what was asked of it
  TREELINE_ERROR_MEMORY = 5,    // out of memory
  TREELINE_ERROR_INTERNAL = 6   // a fault of the library
};

// What went wrong in the last call of this thread that failed; "" before the first. A call that
// succeeds leaves it as it is. The text is valid until the next failure in this thread.
TREELINE_C_API const char* treeline_last_error(void);

// The resources that calls may use: threads, an instruction set, a count of memory. Calls that
// share a context take turns.
typedef struct treeline_context treeline_context;

// Starts `threads` - 1 threads; the caller of each function is the remaining one. `abi_version` is
// TREELINE_ABI_VERSION, and any other number an error: header and library do not belong together.
// `isa` is "scalar", "sse4", "avx2", "avx512", "avx512-bf16", "amx" or "neon"; null is the best
// that the CPU can run, unless the environment variable TREELINE_ISA names another.
TREELINE_C_API treeline_status treeline_context_create(int32_t abi_version, int32_t threads,
                                                       const char* isa, treeline_context** context);

// Ends the threads. No call may be using the context. Null does nothing.
TREELINE_C_API void treeline_context_destroy(treeline_context* context);

// Name of the instruction set in use. The text lives as long as the context.
TREELINE_C_API treeline_status treeline_context_isa(treeline_context* context, const char** isa);

// The most working memory that calls on this context held at one time, in bytes, since it was
// created or last reset.
TREELINE_C_API treeline_status treeline_context_peak_bytes(treeline_context* context,
                                                           size_t* bytes);
TREELINE_C_API treeline_status treeline_context_reset_peak(treeline_context* context);

// Storage type of a tensor's elements. Sums are f32 for all of them.
typedef int32_t treeline_dtype;
enum {
  TREELINE_F32 = 0,
  TREELINE_BF16 = 1,
  TREELINE_F16 = 2,
  TREELINE_Q8_0 = 3  // blocks of 32 int8 with one f16 scale, 34 bytes; keys and values only
};

// Bytes of a row of `dim` elements. The last q8_0 block of a row is whole.
TREELINE_C_API treeline_status treeline_row_bytes(treeline_dtype dtype, int32_t dim, size_t* bytes);

// Rounds source[dim] to the nearest values of the type. `row` holds treeline_row_bytes, aligned to
// 4 bytes for f32 and to 2 for the others.
TREELINE_C_API treeline_status treeline_encode_row(treeline_dtype dtype, const float* source,
                                                   int32_t dim, void* row);

// The inverse: reads a row of `dim` elements into target[dim].
TREELINE_C_API treeline_status treeline_decode_row(treeline_dtype dtype, const void* row,
                                                   int32_t dim, float* target);

// What attention computes. The score of query position q and key position k in head h is
//   s = scale * (query . key);  with a softcap, s = softcap * tanh(s / softcap);
//   with ALiBi, s -= alibi_slopes[h] * |q - k|.
// Query head h reads key head h / (heads / kv_heads).
typedef struct treeline_spec {
  int32_t heads;
  int32_t kv_heads;    // divides heads
  int32_t head_dim;    // of queries and keys; a multiple of 8 up to 576, for gradients up to 256
  int32_t v_head_dim;  // of values and the output; likewise
  float scale;
  float softcap;              // 0: none
  int64_t window;             // 0: none; otherwise k is visible to q only if |q - k| < window
  int32_t causal;             // 0 or 1; if 1, k is visible to q only if k <= q
  const float* alibi_slopes;  // [alibi_slopes_count]; may be null if that is 0
  size_t alibi_slopes_count;  // 0 or heads
  const float* sinks;         // [sinks_count]; may be null if that is 0
  size_t sinks_count;         // 0 or heads
  int32_t bf16_terms;  // 0, 1 or 2; if not 0, attention of many tokens may be computed in bf16, on
                       // CPUs that multiply in it: queries and keys as sums of so many numbers
  int32_t int8_queries;  // 0 or 1; if 1, queries that meet q8_0 keys in decoding may be rounded to
                         // 8 bits, and weights to 14, on CPUs that multiply such numbers
} treeline_spec;

// Sets every field to the usual spec of a head shape: v_head_dim = head_dim,
// scale = 1 / sqrt(head_dim), everything else off.
TREELINE_C_API treeline_status treeline_spec_init(treeline_spec* spec, int32_t heads,
                                                  int32_t kv_heads, int32_t head_dim);

// Read-only [tokens, heads, dim]. Strides are bytes.
typedef struct treeline_tensor {
  const void* data;  // may be null if tokens is 0
  int64_t tokens;
  int64_t token_stride;
  int64_t head_stride;
  int32_t heads;
  int32_t dim;
  treeline_dtype dtype;
} treeline_tensor;

// Writable f32 [tokens, heads, dim]; gradients are added to what is there. Strides are bytes.
typedef struct treeline_gradient {
  float* data;  // may be null if tokens is 0
  int64_t tokens;
  int64_t token_stride;
  int64_t head_stride;
  int32_t heads;
  int32_t dim;
} treeline_gradient;

// Rows packed one after the other. Nothing is checked until the view is used.
TREELINE_C_API treeline_tensor treeline_tensor_dense(const void* data, treeline_dtype dtype,
                                                     int64_t tokens, int32_t heads, int32_t dim);
TREELINE_C_API treeline_gradient treeline_gradient_dense(float* data, int64_t tokens, int32_t heads,
                                                         int32_t dim);

// Keys or values. Strides are bytes.
typedef struct treeline_kv_side {
  const void* base;          // strided: the address of slot 0; null if paged
  const void* const* pages;  // paged: [page_count], each page's first slot; null if strided
  int64_t slot_stride;
  int64_t head_stride;
} treeline_kv_side;

// Keys and values, read where they lie: slots in one strided tensor, or in pages of equal size.
// Page p holds slots [p * page_slots, (p + 1) * page_slots). Slots are in increasing position.
typedef struct treeline_kv {
  treeline_kv_side k;
  treeline_kv_side v;
  int64_t slots;       // in use; slots beyond are never read
  int64_t page_slots;  // slots of a page; 0: strided
  int64_t page_count;  // 0 if strided
  int32_t kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;
  treeline_dtype dtype;
} treeline_kv;

// Packed [slots, kv_heads, head_dim] and [slots, kv_heads, v_head_dim]. Nothing is checked until
// the view is used.
TREELINE_C_API treeline_kv treeline_kv_dense(const void* k, const void* v, treeline_dtype dtype,
                                             int64_t slots, int32_t kv_heads, int32_t head_dim,
                                             int32_t v_head_dim);

// Pages of packed [kv_heads, page_slots, head_dim] and [kv_heads, page_slots, v_head_dim], as
// caches hold them. Nothing is checked until the view is used.
TREELINE_C_API treeline_kv treeline_kv_paged(const void* const* k_pages, const void* const* v_pages,
                                             int64_t page_count, treeline_dtype dtype,
                                             int64_t slots, int64_t page_slots, int32_t kv_heads,
                                             int32_t head_dim, int32_t v_head_dim);

// Absolute token positions: that of slot i is first + (i / run) * stride + i % run.
typedef struct treeline_segment {
  int64_t first;
  int64_t run;     // positive
  int64_t stride;  // at least run
  int64_t count;   // 0: no slots, and the other fields do not matter
} treeline_segment;

// The slots of segments[0], then those of segments[1]; strictly increasing.
typedef struct treeline_positions {
  treeline_segment segments[2];
} treeline_positions;

// first, first + 1, …, first + count - 1. Nothing is checked until the positions are used.
TREELINE_C_API treeline_positions treeline_positions_contiguous(int64_t first, int64_t count);

// Attention of each row over one subset of the keys. A row with no keys has lse = -inf and out = 0.
typedef struct treeline_partial {
  float* out;  // [rows, v_head_dim], normalised; may be null if rows is 0
  float* lse;  // [rows], natural log of the sum of exp(score); may be null if rows is 0
  int64_t rows;
  int32_t v_head_dim;
} treeline_partial;

// One sequence: queries over the keys of one shard.
typedef struct treeline_attend_task {
  treeline_tensor q;  // [tokens, heads, head_dim]; f32, bf16 or f16
  treeline_positions q_positions;
  treeline_kv kv;
  treeline_positions kv_positions;
  treeline_partial result;  // rows [token, head]; overwritten
} treeline_attend_task;

// Attention of the queries of tasks[task_count] over the keys of their own task, without sinks.
// `tasks` may be null if there are none.
TREELINE_C_API treeline_status treeline_attend(treeline_context* context, const treeline_spec* spec,
                                               const treeline_attend_task* tasks,
                                               size_t task_count);

// target := parts[0] (+) parts[1] (+) …, over disjoint key sets, all of the same shape. Bitwise
// commutative for two parts. Parts are only read; `target` may be the same memory as one of them.
// No parts (then null is allowed) make every row of the target one with no keys.
TREELINE_C_API treeline_status treeline_merge(treeline_context* context,
                                              const treeline_partial* parts, size_t part_count,
                                              const treeline_partial* target);

// Adds the spec's sinks, one more score without a value per row, to a partial whose rows are
// [token, head]. Call it once per sequence, after the last merge. Without sinks it does nothing.
TREELINE_C_API treeline_status treeline_apply_sinks(const treeline_spec* spec,
                                                    const treeline_partial* partial);

// Gradients of one sequence. `out` and `lse` are the final ones: over all shards, with sinks.
typedef struct treeline_backward_task {
  treeline_tensor q;
  treeline_positions q_positions;
  treeline_kv kv;  // f32, bf16 or f16
  treeline_positions kv_positions;
  treeline_tensor out;    // f32 [tokens, heads, v_head_dim]
  treeline_tensor d_out;  // f32 [tokens, heads, v_head_dim]
  const float* lse;       // [tokens, heads]; may be null if there are none
  size_t lse_count;       // tokens * heads
  treeline_gradient dq;   // [tokens, heads, head_dim]
  treeline_gradient dk;   // [slots, kv_heads, head_dim]
  treeline_gradient dv;   // [slots, kv_heads, v_head_dim]
} treeline_backward_task;

// Adds the gradients of tasks[task_count] to their dq, dk and dv. The sums do not depend on the
// number of threads. `tasks` may be null if there are none.
TREELINE_C_API treeline_status treeline_attend_backward(treeline_context* context,
                                                        const treeline_spec* spec,
                                                        const treeline_backward_task* tasks,
                                                        size_t task_count);

// d_sinks[h] -= the sum over tokens of p_sink (d_out . out), with p_sink = exp(sinks[h] - lse).
// `out` and `d_out` are f32 [tokens, heads, v_head_dim], lse_count is tokens * heads and
// d_sinks_count is heads. The spec must have sinks.
TREELINE_C_API treeline_status treeline_sinks_backward(const treeline_spec* spec,
                                                       const treeline_tensor* out,
                                                       const treeline_tensor* d_out,
                                                       const float* lse, size_t lse_count,
                                                       float* d_sinks, size_t d_sinks_count);

#ifdef __cplusplus
}  // extern "C"
#endif

// NOLINTEND(readability-identifier-naming)
