#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/gguf.h"
#include "treeline/spec.h"

namespace treeline::model {

// What a Llama is made of.
struct LlamaShape {
  std::string name;  // what the file calls it
  int layers = 0;
  int width = 0;  // of the residual stream
  int ffn = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;    // of queries and keys
  int v_head_dim = 0;  // of values
  int rope_dims = 0;   // of a head that are rotated, pairs of neighbours; the rest is not
  int vocabulary = 0;
  std::int64_t context = 0;  // tokens that the model was trained for
  std::int64_t window = 0;   // tokens that a query sees; 0: all before it
  float epsilon = 0.0f;      // of norms
  double rope_base = 0.0;
  double rope_scale = 1.0;  // positions are divided by it

  AttentionSpec Spec() const;
};

// A matrix [rows, columns] of a type that ggml knows, where it lies in the file.
struct Matrix {
  const std::byte* data = nullptr;
  int type = 0;  // ggml_type
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::size_t row_bytes = 0;

  const std::byte* Row(std::int64_t row) const {
    return data + static_cast<std::size_t>(row) * row_bytes;
  }
  // target [end - begin] = those columns of a row, as floats. Both are multiples of the type's
  // block, or the row's end.
  void Read(std::int64_t row, std::int64_t begin, std::int64_t end, float* target) const noexcept;
  void Read(std::int64_t row, float* target) const noexcept { Read(row, 0, columns, target); }
};

struct LlamaLayer {
  std::span<const float> attention_norm;  // [width]
  Matrix q;                               // [heads * head_dim, width]
  Matrix k;                               // [kv_heads * head_dim, width]
  Matrix v;                               // [kv_heads * v_head_dim, width]
  Matrix output;                          // [width, heads * v_head_dim]
  std::span<const float> ffn_norm;        // [width]
  Matrix gate;                            // [ffn, width]
  Matrix up;                              // [ffn, width]
  Matrix down;                            // [width, ffn]
};

// The weights of a model of the Llama architecture, in a GGUF file. Ranks of a process share one;
// processes of a host share its memory. Immutable.
class LlamaModel {
 public:
  // Throws FormatError if the file is no such model, and says what it has instead.
  explicit LlamaModel(const std::string& path);
  // The same for a file that lies in memory, which is borrowed. `name` is for errors.
  LlamaModel(std::span<const std::byte> bytes, const std::string& name);

  const std::string& path() const { return gguf_.name(); }
  const Gguf& gguf() const { return gguf_; }
  const LlamaShape& shape() const { return shape_; }
  const Matrix& embedding() const { return embedding_; }               // [vocabulary, width]
  const Matrix& head() const { return head_; }                         // [vocabulary, width]
  std::span<const float> output_norm() const { return output_norm_; }  // [width]
  const std::vector<LlamaLayer>& layers() const { return layers_; }
  // [rope_dims / 2] by which the frequencies of rotations are divided; empty: 1.
  std::span<const float> rope_factors() const { return rope_factors_; }

  std::size_t weight_bytes() const { return weight_bytes_; }
  std::int64_t parameters() const { return parameters_; }
  // A number that tells this model from others: of its shape, and of some bytes of every tensor.
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  LlamaModel(std::unique_ptr<MappedFile> file, const std::string& path);

  std::unique_ptr<MappedFile> file_;  // or null: the bytes are borrowed
  Gguf gguf_;
  LlamaShape shape_;
  Matrix embedding_;
  Matrix head_;
  std::span<const float> output_norm_;
  std::vector<LlamaLayer> layers_;
  std::span<const float> rope_factors_;
  std::size_t weight_bytes_ = 0;
  std::int64_t parameters_ = 0;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace treeline::model
