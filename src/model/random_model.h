#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace treeline::model {

// The shape of a published model, for files of random weights that cost what the real ones do.
struct KnownShape {
  const char* name;
  int layers;
  int width;
  int ffn;
  int heads;
  int kv_heads;
  int head_dim;
  int vocabulary;
  int context;
  float rope_base;
  bool tied;  // the head is the embedding
};

const std::vector<KnownShape>& KnownShapes();

// Types that matrices can have, as ggml names them, in capitals.
std::vector<std::string> WeightTypes();

struct RandomModelOptions {
  std::string like;       // a name of KnownShapes
  int layers = 0;         // 0: as many as the real one
  std::string type = "";  // one of WeightTypes; none: Q4_K if the shape's rows divide, or Q8_0
  std::uint64_t seed = 1;
  std::string chat_template = "";  // none: the model is not for chats
};

// Writes a GGUF file of that shape. Matrices repeat a few random rows: to quantize all would take
// long, and products do not care. Tokens are the 256 bytes, and names without a meaning. Throws
// ArgumentError if an option is out of range, listing what is allowed, or the path is that of
// something else than a file, and Error if it cannot be written. The file is there once it is
// whole: until then, one that was there before is kept.
void WriteRandomModel(const RandomModelOptions& options, const std::string& path);

}  // namespace treeline::model
