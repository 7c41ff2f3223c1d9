#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "treeline/attention.h"
#include "treeline/isa.h"

// What one instruction set can do. A kernel works on one piece of a task, in memory that it is
// given, on the thread that calls it; src/backend/cpu cuts tasks into pieces.
//
// The query rows that share key head g of a task are numbered token * group + i, i < group, for
// query head g * group + i. Kernels see only such rows.

namespace treeline::cpu {

class Turns;
namespace bf16 {
struct Multiplier;
}

// A block of a key head's query rows over all keys that they see.
struct ForwardArgs {
  const AttentionSpec* spec;
  const AttendTask* task;
  int kv_head;
  std::int64_t row_begin;
  int rows;              // at most those of forward_block()
  std::byte* workspace;  // as many bytes as forward_block() says, 64-byte aligned
};
// What a kernel wants to be given at once. Keys and values are loaded once for all rows of a block,
// which costs as much as computing where they lie far apart in memory: the more rows the better, as
// far as the second-level cache and a thread's memory go.
struct ForwardBlock {
  int rows;  // at most; a multiple of 96 that halves to it
  std::size_t workspace_bytes;
};
// Up to this many query rows share a key head in the decode kernel; more are tiled.
inline constexpr std::int64_t kDecodeRows = 16;

// How large a piece of decoding is.
struct DecodeShape {
  int kv_heads = 1;
  int rows = 1;         // of each key head
  int classes = 1;      // of slots
  int own_classes = 1;  // of them, that this piece reduces
};

// Some query rows of some key heads over a part of the slots. Few rows: each key is read once.
// In order: slots that are the same modulo `classes` are reduced apart from the others, one after
// the other, in blocks that start at multiples of 16 * classes; the bits of a class then depend on
// nothing but its keys. Otherwise there is one class, in whatever order is fastest.
struct DecodeArgs {
  const AttentionSpec* spec;
  const AttendTask* task;
  int kv_head_begin;
  int kv_head_end;
  int row_begin;  // of the rows of a key head: row = token * group + head in the group
  int row_end;
  SlotRange slots;
  bool in_order = false;
  int classes = 1;
  int class_begin = 0;
  int class_end = 1;
  float* out;  // [class, tokens, heads, v_head_dim]; what is not this piece's is not touched
  float* lse;  // [class, tokens, heads]
  std::size_t class_stride = 0;  // floats between the results of two classes
  std::byte* workspace;          // decode_workspace(spec, shape) bytes, 64-byte aligned
};

// A block of keys of one key head, with all query rows that see it. Adds to dk and dv, and to dq
// when it is this block's turn.
struct BackwardArgs {
  const AttentionSpec* spec;
  const BackwardTask* task;
  int kv_head;
  std::int64_t key_begin;
  int keys;  // at most those of backward_block()
  Turns* turns;
  std::uint32_t item;                        // this block's number among all blocks
  std::optional<std::uint32_t> predecessor;  // that of the block that adds to the same rows of dq
                                             // before it, if there is one
  std::byte* workspace;  // as many bytes as backward_block() says, 64-byte aligned
};
// What a kernel wants to be given at once: query rows are loaded once for all keys of a block. The
// order of sums depends on it, so it must not depend on the number of threads.
struct BackwardBlock {
  int keys;
  std::size_t workspace_bytes;
};

// target = parts[0] (+) parts[1] (+) … for rows [row_begin, row_end).
struct MergeArgs {
  const Partial* parts;
  std::size_t count;  // 1 to kMaxMergeParts
  const Partial* target;
  std::size_t row_begin;
  std::size_t row_end;
};
inline constexpr std::size_t kMaxMergeParts = 64;

// Rows of a matrix, turned round so that a column of them lies together: panel [depth, panel_rows],
// 64-byte aligned; rows beyond `rows` are 0. `depth` is a multiple of 4; source and stride are
// aligned to 16 bytes.
struct PackArgs {
  const float* source;  // [rows, depth], rows `stride` floats apart
  std::int64_t stride;
  int rows;  // at most panel_rows
  int depth;
  float* panel;
};

// c [tokens, rows] = a [tokens, depth] * panel, or += it. A sum runs over `depth` in order,
// whatever else is computed: its bits depend on its own token and row only.
struct PanelArgs {
  const float* a;
  std::int64_t a_stride;  // floats between tokens
  const float* panel;     // [depth, panel_rows]
  int tokens;
  int rows;  // at most panel_rows
  int depth;
  float* c;
  std::int64_t c_stride;
  bool add;
};

// Up to 32 tokens as the left side of a bf16::Product: target [terms, ceil(columns / 32), 32, 32],
// 64-byte aligned. A second term is what rounding took from the first. What is not of a token or a
// column is 0.
struct RoundTokensArgs {
  const float* x;
  std::int64_t x_stride;  // floats between tokens
  int tokens;
  int columns;
  int terms;  // 1 or 2
  std::uint16_t* target;
};

// Up to 32 rows of a matrix as the right side: tiles [2, ceil(depth / 32)]. What is not of a row or
// a column is 0.
struct PackTilesArgs {
  const float* source;  // [rows, depth], rows `stride` floats apart
  std::int64_t stride;
  int rows;
  int depth;
  std::uint16_t* scratch;  // as large as tiles
  std::uint16_t* tiles;
};

// Products of whole numbers of 14 bits, of which 32, a unit, have a scale. A block is up to
// kI16Tokens tokens: their numbers are [unit, kI16Tokens, kI16Unit], their scales
// [unit, kI16Tokens]. A panel is up to kI16PanelRows rows: tiles [2, units] as of a bf16::Product,
// scales [unit, kI16PanelRows]. All are aligned to 64 bytes.
inline constexpr int kI16Unit = 32;
inline constexpr int kI16Tokens = 48;
inline constexpr int kI16PanelRows = 32;

struct I16TokensArgs {
  const float* x;
  std::int64_t x_stride;  // floats between tokens
  int tokens;
  int columns;
  std::int16_t* target;
  float* scales;
};

struct I16PackArgs {
  const float* source;  // [rows, depth], rows `stride` floats apart
  std::int64_t stride;
  int rows;
  int depth;
  std::uint16_t* scratch;  // as large as tiles
  std::uint16_t* tiles;
  float* scales;
};

// c [tokens, rows] = block * panel, or += it, over `steps` units. A sum's bits depend on its own
// token and row only.
struct I16PanelArgs {
  const std::int16_t* tokens_in_i16;
  const float* token_scales;
  const std::uint16_t* tiles;
  const float* scales;
  int tokens;
  int rows;
  int steps;
  float* c;
  std::int64_t c_stride;
  bool add;
};

struct I16Kernels {
  void (*round_tokens)(const I16TokensArgs& args) noexcept;
  void (*pack_panel)(const I16PackArgs& args) noexcept;
  void (*multiply_panel)(const I16PanelArgs& args) noexcept;
};

// How weights are packed in a row, as GGUF has them.
enum class RowFormat : std::uint8_t { kQ4_0, kQ4_1, kQ8_0, kQ4_K, kQ6_K };

// A token's activations in 16 bits: x[i] is about values[i] * scales[i / kFineBlock].
inline constexpr int kFineBlock = 32;
struct FineRow {
  std::int16_t* values;  // [columns]
  float* scales;         // [columns / kFineBlock]
  float* sums;           // [columns / kFineBlock]: of x, before it was rounded
};

// out [tokens, rows] = x [tokens, columns] * weights^T. An element's bits depend on its own token
// and row only.
struct DotRowsArgs {
  RowFormat format;
  const std::byte* weights;  // [rows, row_bytes]
  std::size_t row_bytes;
  int rows;
  int columns;  // whole blocks of the format
  const FineRow* x;
  int tokens;
  float* out;
  std::int64_t out_stride;
};

// Rotates pairs of neighbours in each head by angles that are given.
struct RotateArgs {
  float* x;  // [heads, head_dim]
  int heads;
  int head_dim;
  int pairs;             // of the beginning of a head; the rest stays
  const float* cosines;  // [pairs]
  const float* sines;    // [pairs]
};

// Limits of the machine, for reports.
struct ProbeArgs {
  const std::byte* data;  // read by `read_probe`, four streams at a time
  std::size_t bytes;
  std::size_t iterations;  // of `fma_probe`
};

// Every entry is non-null, but for those that say otherwise.
struct KernelTable {
  Isa isa;
  const bf16::Multiplier* multiplier;  // null if everything is computed in f32; then these, too:
  void (*round_tokens)(const RoundTokensArgs& args) noexcept;
  void (*pack_tiles)(const PackTilesArgs& args) noexcept;
  int bf16_terms;  // the most that AttentionSpec may ask for: with more, f32 is as fast
  ForwardBlock (*forward_block)(const AttentionSpec& spec, const AttendTask& task) noexcept;
  void (*forward)(const ForwardArgs& args) noexcept;
  std::size_t (*decode_workspace)(const AttentionSpec& spec, const DecodeShape& shape) noexcept;
  void (*decode)(const DecodeArgs& args) noexcept;
  bool rounds_queries;  // decode does, if the spec lets it
  BackwardBlock (*backward_block)(const AttentionSpec& spec, const BackwardTask& task) noexcept;
  void (*backward)(const BackwardArgs& args) noexcept;
  void (*merge)(const MergeArgs& args) noexcept;
  int (*panel_rows)() noexcept;
  void (*pack_panel)(const PackArgs& args) noexcept;
  void (*multiply_panel)(const PanelArgs& args) noexcept;
  const I16Kernels* i16;  // null if they are no faster than others here
  // x [columns], a multiple of kFineBlock. What is not finite makes every product with it NaN.
  void (*refine_row)(const float* x, int columns, const FineRow& target) noexcept;
  void (*dot_rows)(const DotRowsArgs& args) noexcept;
  // out = x / sqrt(mean of squares + epsilon) * weight: [n] each, not overlapping.
  void (*rms_norm)(const float* x, const float* weight, int n, float epsilon, float* out) noexcept;
  void (*rotate)(const RotateArgs& args) noexcept;
  // gate = gate * logistic(gate) * up: [n] each.
  void (*swiglu)(float* gate, const float* up, int n) noexcept;
  // Returns a checksum, so that no read can be left out.
  std::uint64_t (*read_probe)(const ProbeArgs& args) noexcept;
  // Returns the floating-point operations done.
  double (*fma_probe)(const ProbeArgs& args) noexcept;
};

// Those that tests run on: AttainableIsas(), and kPlainBf16 where there is AVX-512.
std::vector<Isa> TestedIsas();

// The table of one of TestedIsas().
const KernelTable& TableFor(Isa isa);

// The table that a context asks for.
const KernelTable& TableFor(const Context& context);

}  // namespace treeline::cpu
