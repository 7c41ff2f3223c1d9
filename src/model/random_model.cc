#include "model/random_model.h"

#include <ggml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <system_error>

#include "core/check.h"
#include "model/gguf_writer.h"

namespace treeline::model {
namespace {

// A tensor to be written. Those without rows are norms: ones.
struct Plan {
  std::string name;
  ggml_type type;
  std::int64_t columns;
  std::int64_t rows;  // 0: a vector
};

const KnownShape& FindShape(const std::string& name) {
  std::string all;
  for (const KnownShape& shape : KnownShapes()) {
    if (name == shape.name) return shape;
    all.append(all.empty() ? "" : ", ").append(shape.name);
  }
  Throw<ArgumentError>("there is no shape '", name, "'; there are ", all);
}

// Of ASCII; other characters are left.
std::string ToUpper(std::string text) {
  for (char& c : text) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return text;
}

std::string NameOf(ggml_type type) { return ToUpper(ggml_type_name(type)); }

// Without those that need a matrix of importances, or are none of weights.
std::vector<ggml_type> TypesOfWeights() {
  std::vector<ggml_type> types;
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    const auto type = static_cast<ggml_type>(i);
    if (ggml_type_size(type) == 0 || ggml_quantize_requires_imatrix(type)) continue;
    const ggml_type_traits& traits = *ggml_get_type_traits(type);
    const bool converts = traits.to_float != nullptr && traits.from_float_ref != nullptr;
    if (type == GGML_TYPE_F32 || converts) types.push_back(type);
  }
  return types;
}

ggml_type ParseType(const std::string& name) {
  const std::string asked = ToUpper(name);
  std::string all;
  for (const ggml_type type : TypesOfWeights()) {
    if (asked == NameOf(type)) return type;
    all.append(all.empty() ? "" : ", ").append(NameOf(type));
  }
  Throw<ArgumentError>("there is no type '", name, "' of weights; there are ", all);
}

ggml_type DefaultType(const KnownShape& s) {
  for (const int columns : {s.width, s.heads * s.head_dim, s.ffn}) {
    if (columns % ggml_blck_size(GGML_TYPE_Q4_K) != 0) return GGML_TYPE_Q8_0;
  }
  return GGML_TYPE_Q4_K;
}

// A file that is written beside its place, and moved there when it is whole; otherwise, nothing is
// left of it.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(Resolve(path)), part_(path_ + "." + std::to_string(getpid()) + ".part") {
    std::error_code ignored;
    const std::filesystem::file_status status = std::filesystem::status(path_, ignored);
    // To move a file to where a device is would replace the device.
    Require(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status), "'", path,
            "' is there, and is no regular file");
    errno = 0;
    stream_.open(part_, std::ios::binary | std::ios::trunc);
    if (!stream_) Fail(errno);
  }
  ~NewFile() {
    std::error_code ignored;
    std::filesystem::remove(part_, ignored);
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void Write(std::span<const std::byte> bytes) {
    errno = 0;
    stream_.write(reinterpret_cast<const char*>(bytes.data()),
                  static_cast<std::streamsize>(bytes.size()));
    if (!stream_) Fail(errno);
  }

  void Finish() {
    errno = 0;
    stream_.close();
    if (!stream_) Fail(errno);
    std::error_code error;
    std::filesystem::rename(part_, path_, error);
    if (error) Fail(error.value());
  }

 private:
  // Where a link leads: it is what it leads to that is replaced.
  static std::string Resolve(const std::string& path) {
    std::error_code error;
    const std::filesystem::path resolved = std::filesystem::canonical(path, error);
    return error ? path : resolved.string();
  }
  [[noreturn]] void Fail(int reason) const {
    Throw<Error>("cannot write '", path_, "': ", std::strerror(reason != 0 ? reason : EIO));
  }

  const std::string path_;
  const std::string part_;
  std::ofstream stream_;
};

// Byte-level tokens: every byte as the character that GPT-2's vocabularies have for it.
std::vector<std::string> MakeTokens(int count) {
  std::vector<std::string> tokens;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    const int code = printable ? byte : next++;
    std::string text;
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else {
      text += static_cast<char>(0xC0 | (code >> 6));
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
    tokens.push_back(text);
  }
  for (int i = 256; i < count; ++i) {
    tokens.push_back(std::string("<").append(std::to_string(i)).append(">"));
  }
  return tokens;
}

void SetValues(GgufWriter& writer, const KnownShape& shape, int layers,
               const std::string& chat_template) {
  const auto number = [](int n) { return static_cast<std::uint32_t>(n); };
  writer.Set("general.architecture", std::string_view("llama"));
  writer.Set("general.name", std::string("random weights like ").append(shape.name));
  writer.Set("llama.block_count", number(layers));
  writer.Set("llama.context_length", number(shape.context));
  writer.Set("llama.embedding_length", number(shape.width));
  writer.Set("llama.feed_forward_length", number(shape.ffn));
  writer.Set("llama.attention.head_count", number(shape.heads));
  writer.Set("llama.attention.head_count_kv", number(shape.kv_heads));
  writer.Set("llama.attention.key_length", number(shape.head_dim));
  writer.Set("llama.attention.value_length", number(shape.head_dim));
  writer.Set("llama.rope.dimension_count", number(shape.head_dim));
  writer.Set("llama.rope.freq_base", shape.rope_base);
  writer.Set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  writer.Set("llama.vocab_size", number(shape.vocabulary));
  constexpr std::int32_t kNormal = 1;
  constexpr std::int32_t kControl = 3;
  const std::vector<std::string> tokens = MakeTokens(shape.vocabulary);
  std::vector<std::int32_t> types(tokens.size(), kNormal);
  types.back() = kControl;
  writer.Set("tokenizer.ggml.model", std::string_view("gpt2"));
  writer.Set("tokenizer.ggml.pre", std::string_view("llama-bpe"));
  writer.Set("tokenizer.ggml.tokens", std::span<const std::string>(tokens));
  writer.Set("tokenizer.ggml.token_type", std::span<const std::int32_t>(types));
  // Of two bytes that hardly ever meet: libllama wants some.
  const std::vector<std::string> merges{tokens[1] + " " + tokens[2]};
  writer.Set("tokenizer.ggml.merges", std::span<const std::string>(merges));
  writer.Set("tokenizer.ggml.eos_token_id", number(shape.vocabulary - 1));
  writer.Set("tokenizer.ggml.bos_token_id", number(shape.vocabulary - 1));
  writer.Set("tokenizer.ggml.add_bos_token", false);
  if (!chat_template.empty()) writer.Set("tokenizer.chat_template", chat_template);
}

std::vector<Plan> PlanTensors(const KnownShape& s, int layers, ggml_type type) {
  const std::int64_t q = std::int64_t{s.heads} * s.head_dim;
  const std::int64_t k = std::int64_t{s.kv_heads} * s.head_dim;
  std::vector<Plan> plans{{"token_embd.weight", type, s.width, s.vocabulary},
                          {"output_norm.weight", GGML_TYPE_F32, s.width, 0}};
  if (!s.tied) plans.push_back({"output.weight", type, s.width, s.vocabulary});
  for (int i = 0; i < layers; ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    plans.push_back({prefix + "attn_norm.weight", GGML_TYPE_F32, s.width, 0});
    plans.push_back({prefix + "attn_q.weight", type, s.width, q});
    plans.push_back({prefix + "attn_k.weight", type, s.width, k});
    plans.push_back({prefix + "attn_v.weight", type, s.width, k});
    plans.push_back({prefix + "attn_output.weight", type, q, s.width});
    plans.push_back({prefix + "ffn_norm.weight", GGML_TYPE_F32, s.width, 0});
    plans.push_back({prefix + "ffn_gate.weight", type, s.width, s.ffn});
    plans.push_back({prefix + "ffn_up.weight", type, s.width, s.ffn});
    plans.push_back({prefix + "ffn_down.weight", type, s.ffn, s.width});
  }
  return plans;
}

void WriteTensor(const Plan& plan, std::mt19937_64& random, const GgufWriter::Sink& sink) {
  std::uint64_t written = 0;
  const auto write = [&](std::span<const std::byte> bytes) {
    sink(bytes);
    written += bytes.size();
  };
  if (plan.rows == 0) {
    const std::vector<float> ones(static_cast<std::size_t>(plan.columns), 1.0f);
    write(std::as_bytes(std::span(ones)));
  } else {
    constexpr std::int64_t kDistinct = 64;  // rows
    const std::int64_t rows = std::min(kDistinct, plan.rows);
    std::normal_distribution<float> normal(0.0f,
                                           1.0f / std::sqrt(static_cast<float>(plan.columns)));
    std::vector<float> values(static_cast<std::size_t>(rows * plan.columns));
    std::ranges::generate(values, [&] { return normal(random); });
    const std::size_t row_bytes = ggml_row_size(plan.type, plan.columns);
    std::vector<std::byte> quantized(row_bytes * static_cast<std::size_t>(rows));
    ggml_quantize_chunk(plan.type, values.data(), quantized.data(), 0, rows, plan.columns, nullptr);
    for (std::int64_t row = 0; row < plan.rows; ++row) {
      const std::size_t source = random() % static_cast<std::size_t>(rows);
      write(std::span(quantized).subspan(source * row_bytes, row_bytes));
    }
  }
  const std::vector<std::byte> padding(GgufWriter::Padding(written));
  sink(padding);
}

}  // namespace

const std::vector<KnownShape>& KnownShapes() {
  static const std::vector<KnownShape> shapes{
      {"llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0f, false},
      {"llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072, 500000.0f, false},
      {"llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0f, true},
      {"llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072, 500000.0f, true},
      {"llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096, 10000.0f, false},
      {"mistral-7b", 32, 4096, 14336, 32, 8, 128, 32768, 32768, 1000000.0f, false},
      {"smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, 100000.0f, true},
      {"smollm2-360m", 32, 960, 2560, 15, 5, 64, 49152, 8192, 100000.0f, true},
      {"tiny", 2, 256, 512, 9, 3, 32, 320, 8192, 10000.0f, true},
  };
  return shapes;
}

std::vector<std::string> WeightTypes() {
  std::vector<std::string> names;
  for (const ggml_type type : TypesOfWeights()) names.push_back(NameOf(type));
  return names;
}

void WriteRandomModel(const RandomModelOptions& options, const std::string& path) {
  const KnownShape& shape = FindShape(options.like);
  const int layers = options.layers == 0 ? shape.layers : options.layers;
  Require(layers >= 1 && layers <= 1024, "layers is ", options.layers,
          "; it must be from 1 to 1024, or 0 for those of the real model");
  const ggml_type type = options.type.empty() ? DefaultType(shape) : ParseType(options.type);
  const std::vector<Plan> plans = PlanTensors(shape, layers, type);
  GgufWriter writer;
  SetValues(writer, shape, layers, options.chat_template);
  for (const Plan& plan : plans) {
    Require(plan.columns % ggml_blck_size(plan.type) == 0, "rows of ", plan.columns,
            " weights cannot be of type ", NameOf(plan.type), ", whose blocks have ",
            ggml_blck_size(plan.type));
    const std::vector<std::int64_t> extents =
        plan.rows == 0 ? std::vector{plan.columns} : std::vector{plan.columns, plan.rows};
    writer.AddTensor(plan.name, plan.type, extents,
                     ggml_row_size(plan.type, plan.columns) *
                         static_cast<std::uint64_t>(std::max<std::int64_t>(plan.rows, 1)));
  }
  NewFile file(path);
  const GgufWriter::Sink sink = [&](std::span<const std::byte> bytes) { file.Write(bytes); };
  writer.WriteHead(sink);
  std::mt19937_64 random(options.seed);
  for (const Plan& plan : plans) WriteTensor(plan, random, sink);
  file.Finish();
}

}  // namespace treeline::model
