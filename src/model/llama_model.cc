#include "model/llama_model.h"

#include <ggml.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/hash.h"

namespace treeline::model {
namespace {

constexpr int kMaxWidth = 1 << 20;
constexpr int kMaxLayers = 1024;

void RequireArchitecture(const Gguf& gguf) {
  const std::string_view architecture = gguf.Text("general.architecture");
  if (architecture != "llama") {
    Throw<FormatError>("'", gguf.name(), "' has the architecture '", architecture,
                       "'; supported is 'llama' (Llama 2 and 3, SmolLM2, Mistral)");
  }
  const std::int64_t experts = gguf.Integer("llama.expert_count", 0, kMaxWidth, 0);
  if (experts > 0) {
    Throw<FormatError>("'", gguf.name(), "' has ", experts, " experts; none are supported");
  }
}

double RopeScale(const Gguf& gguf) {
  const std::string_view type = gguf.Text("llama.rope.scaling.type", "none");
  if (type == "none") {
    return gguf.Number("llama.rope.scale_linear", 1.0, 1e6, 1.0);  // what old files have
  }
  if (type != "linear") {
    Throw<FormatError>("'", gguf.name(), "' scales rotations by '", type,
                       "'; 'none', 'linear' and factors (Llama 3.1) are supported");
  }
  return gguf.Number("llama.rope.scaling.factor", 1.0, 1e6);
}

LlamaShape ReadShape(const Gguf& gguf) {
  RequireArchitecture(gguf);
  const auto integer = [&](const char* key, int most) {
    return static_cast<int>(gguf.Integer(key, 1, most));
  };
  LlamaShape shape;
  shape.name = gguf.Text("general.name", "a Llama");
  shape.layers = integer("llama.block_count", kMaxLayers);
  shape.width = integer("llama.embedding_length", kMaxWidth);
  shape.ffn = integer("llama.feed_forward_length", kMaxWidth);
  shape.heads = integer("llama.attention.head_count", kMaxWidth);
  shape.kv_heads =
      static_cast<int>(gguf.Integer("llama.attention.head_count_kv", 1, kMaxWidth, shape.heads));
  const std::int64_t head_dim = shape.width / shape.heads;
  shape.head_dim =
      static_cast<int>(gguf.Integer("llama.attention.key_length", 1, kMaxWidth, head_dim));
  shape.v_head_dim =
      static_cast<int>(gguf.Integer("llama.attention.value_length", 1, kMaxWidth, head_dim));
  shape.rope_dims =
      static_cast<int>(gguf.Integer("llama.rope.dimension_count", 2, kMaxWidth, shape.head_dim));
  for (const auto& [key, value] : {std::pair{"llama.embedding_length", shape.width},
                                   std::pair{"llama.feed_forward_length", shape.ffn}}) {
    if (value % 32 != 0) {
      Throw<FormatError>("'", gguf.name(), "': ", key, " is ", value,
                         "; it must be a multiple of 32");
    }
  }
  shape.context = gguf.Integer("llama.context_length", 1, std::int64_t{1} << 32);
  shape.window = gguf.Integer("llama.attention.sliding_window", 0, std::int64_t{1} << 32, 0);
  shape.epsilon =
      static_cast<float>(gguf.Number("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0));
  shape.rope_base = gguf.Number("llama.rope.freq_base", 1.0, 1e12, 10000.0);
  shape.rope_scale = RopeScale(gguf);
  if (shape.rope_dims % 2 != 0 || shape.rope_dims > shape.head_dim) {
    Throw<FormatError>("'", gguf.name(), "': llama.rope.dimension_count is ", shape.rope_dims,
                       "; it must be even and at most ", shape.head_dim);
  }
  try {
    Validate(shape.Spec());
  } catch (const ArgumentError& error) {
    Throw<FormatError>("'", gguf.name(), "': ", error.what());
  }
  return shape;
}

// Takes tensors out of a file, so that what is left over shows.
class Tensors {
 public:
  explicit Tensors(const Gguf& gguf) : gguf_(gguf) {
    for (const GgufTensor& tensor : gguf.tensors()) left_.insert(tensor.name);
  }

  bool Has(const std::string& name) const { return gguf_.FindTensor(name) != nullptr; }

  Matrix TakeMatrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    const GgufTensor& tensor = Take(name, {columns, rows, 1, 1});
    const auto type = static_cast<ggml_type>(tensor.type);
    const ggml_type_traits& traits = *ggml_get_type_traits(type);
    if (type != GGML_TYPE_F32 && traits.to_float == nullptr) {
      Throw<FormatError>("'", gguf_.name(), "': tensor ", tensor.Describe(),
                         " is of a type that is no type of weights");
    }
    return {.data = tensor.data.data(),
            .type = tensor.type,
            .rows = rows,
            .columns = columns,
            .row_bytes = ggml_row_size(type, columns)};
  }

  std::span<const float> TakeVector(const std::string& name, std::int64_t size) {
    const GgufTensor& tensor = Take(name, {size, 1, 1, 1});
    if (tensor.type != GGML_TYPE_F32) {
      Throw<FormatError>("'", gguf_.name(), "': tensor ", tensor.Describe(), " must be F32");
    }
    return {reinterpret_cast<const float*>(tensor.data.data()), static_cast<std::size_t>(size)};
  }

  // Throws if the file has tensors that nobody took: they would change what the model computes.
  void RequireAllTaken() const {
    if (left_.empty()) return;
    Throw<FormatError>("'", gguf_.name(), "' has ", left_.size(),
                       " tensors that a Llama of this kind does not have: ",
                       gguf_.FindTensor(*left_.begin())->Describe(),
                       left_.size() > 1 ? " and others" : "");
  }

 private:
  const GgufTensor& Take(const std::string& name, const std::array<std::int64_t, 4>& shape) {
    const GgufTensor* tensor = gguf_.FindTensor(name);
    if (tensor == nullptr) Throw<FormatError>("'", gguf_.name(), "' has no tensor '", name, "'");
    if (tensor->shape != shape) {
      GgufTensor expected = *tensor;
      expected.shape = shape;
      Throw<FormatError>("'", gguf_.name(), "': tensor ", tensor->Describe(), " should be ",
                         expected.Describe());
    }
    left_.erase(name);
    return *tensor;
  }

  const Gguf& gguf_;
  std::set<std::string_view> left_;
};

LlamaLayer TakeLayer(Tensors& tensors, const LlamaShape& s, int layer) {
  const auto name = [&](const char* part) {
    return "blk." + std::to_string(layer) + "." + part + ".weight";
  };
  const std::int64_t q = std::int64_t{s.heads} * s.head_dim;
  const std::int64_t k = std::int64_t{s.kv_heads} * s.head_dim;
  const std::int64_t v = std::int64_t{s.kv_heads} * s.v_head_dim;
  const std::int64_t out = std::int64_t{s.heads} * s.v_head_dim;
  return {.attention_norm = tensors.TakeVector(name("attn_norm"), s.width),
          .q = tensors.TakeMatrix(name("attn_q"), q, s.width),
          .k = tensors.TakeMatrix(name("attn_k"), k, s.width),
          .v = tensors.TakeMatrix(name("attn_v"), v, s.width),
          .output = tensors.TakeMatrix(name("attn_output"), s.width, out),
          .ffn_norm = tensors.TakeVector(name("ffn_norm"), s.width),
          .gate = tensors.TakeMatrix(name("ffn_gate"), s.ffn, s.width),
          .up = tensors.TakeMatrix(name("ffn_up"), s.ffn, s.width),
          .down = tensors.TakeMatrix(name("ffn_down"), s.width, s.ffn)};
}

// Name, shape and ends of a tensor: to read all of a large file would take minutes.
void AddTo(Hash& hash, const GgufTensor& tensor) {
  constexpr std::size_t kSample = 256;
  hash.Add(std::as_bytes(std::span(tensor.name)));
  hash.Add(std::as_bytes(std::span(&tensor.type, 1)));
  hash.Add(std::as_bytes(std::span(tensor.shape)));
  hash.Add(tensor.data.first(std::min(kSample, tensor.data.size())));
  hash.Add(tensor.data.last(std::min(kSample, tensor.data.size())));
}

}  // namespace

AttentionSpec LlamaShape::Spec() const {
  AttentionSpec spec = AttentionSpec::Make(heads, kv_heads, head_dim);
  spec.v_head_dim = v_head_dim;
  spec.causal = true;
  spec.window = window;
  return spec;
}

void Matrix::Read(std::int64_t row, std::int64_t begin, std::int64_t end,
                  float* target) const noexcept {
  const auto ggml = static_cast<ggml_type>(type);
  const std::byte* source = Row(row) + ggml_row_size(ggml, begin);
  if (ggml == GGML_TYPE_F32) {
    std::memcpy(target, source, static_cast<std::size_t>(end - begin) * sizeof(float));
  } else {
    ggml_get_type_traits(ggml)->to_float(source, target, end - begin);
  }
}

LlamaModel::LlamaModel(const std::string& path)
    : LlamaModel(std::make_unique<MappedFile>(path), path) {}

LlamaModel::LlamaModel(std::unique_ptr<MappedFile> file, const std::string& path)
    : LlamaModel(file->bytes(), path) {
  file_ = std::move(file);
}

LlamaModel::LlamaModel(std::span<const std::byte> bytes, const std::string& path)
    : gguf_(bytes, path), shape_(ReadShape(gguf_)) {
  Tensors tensors(gguf_);
  const GgufTensor* embedding = gguf_.FindTensor("token_embd.weight");
  if (embedding == nullptr) {
    Throw<FormatError>("'", path, "' has no tensor 'token_embd.weight'");
  }
  if (embedding->shape[1] > std::int64_t{kMaxWidth} * 8) {
    Throw<FormatError>("'", path, "': tensor ", embedding->Describe(), " has too many tokens");
  }
  shape_.vocabulary = static_cast<int>(embedding->shape[1]);
  embedding_ = tensors.TakeMatrix("token_embd.weight", shape_.vocabulary, shape_.width);
  head_ = tensors.Has("output.weight")
              ? tensors.TakeMatrix("output.weight", shape_.vocabulary, shape_.width)
              : embedding_;
  output_norm_ = tensors.TakeVector("output_norm.weight", shape_.width);
  if (tensors.Has("rope_freqs.weight")) {
    rope_factors_ = tensors.TakeVector("rope_freqs.weight", shape_.rope_dims / 2);
    if (!std::ranges::all_of(rope_factors_, [](float f) { return f > 0.0f && f < 1e6f; })) {
      Throw<FormatError>("'", path, "': 'rope_freqs.weight' must hold positive numbers");
    }
  }
  for (int i = 0; i < shape_.layers; ++i) layers_.push_back(TakeLayer(tensors, shape_, i));
  tensors.RequireAllTaken();
  Hash fingerprint;
  const std::array<double, 12> numbers{static_cast<double>(shape_.layers),
                                       static_cast<double>(shape_.width),
                                       static_cast<double>(shape_.ffn),
                                       static_cast<double>(shape_.heads),
                                       static_cast<double>(shape_.kv_heads),
                                       static_cast<double>(shape_.head_dim),
                                       static_cast<double>(shape_.v_head_dim),
                                       static_cast<double>(shape_.rope_dims),
                                       static_cast<double>(shape_.window),
                                       double{shape_.epsilon},
                                       shape_.rope_base,
                                       shape_.rope_scale};
  fingerprint.Add(std::as_bytes(std::span(numbers)));
  for (const GgufTensor& tensor : gguf_.tensors()) {
    AddTo(fingerprint, tensor);
    weight_bytes_ += tensor.data.size();
    parameters_ += tensor.Elements();
  }
  fingerprint_ = fingerprint.value();
}

}  // namespace treeline::model
