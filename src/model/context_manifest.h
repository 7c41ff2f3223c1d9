#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/llama_rank.h"

namespace treeline::model {

// The file in a saved context's folder that names the others.
inline constexpr const char* kManifestName = "context.json";

// Bytes of a shard that have a checksum of their own, so that ranks can share the checking; the
// last block of a file may be shorter.
inline constexpr std::size_t kContextBlock = std::size_t{4} << 20;

// What it holds.
struct ContextManifest {
  struct Shard {
    std::string file;                      // a name in the folder
    std::vector<std::uint64_t> checksums;  // [blocks]
  };
  std::uint64_t model = 0;  // LlamaModel::fingerprint
  std::string model_name;
  std::string kv_type;
  int first_rank = 0;         // the one with the first token
  std::vector<Shard> shards;  // [ranks that saved it], at least one
  std::vector<Token> tokens;  // at least one
};

// Against accidents and not against an adversary. Any change within 8 aligned bytes changes it.
std::uint64_t ContextChecksum(std::span<const std::byte> bytes);

// 16 digits.
std::string Hex(std::uint64_t value);

// Whether a file of this name could be a shard. No such name leaves the folder.
bool IsShardName(std::string_view name);

std::string FormatManifest(const ContextManifest& manifest);

// Adds its checksum to the text of a JSON object, which must not be empty.
std::string SealManifest(std::string object);

// The inverse of FormatManifest. Throws FormatError, naming `path`, if the text is none that it
// could have made: any text is safe to parse.
ContextManifest ParseManifest(std::string_view text, const std::string& path);

// Throws FormatError unless the context is of this model and its keys are of this type.
void RequireModel(const ContextManifest& manifest, const LlamaModel& model, DType kv_type,
                  const std::string& path);

}  // namespace treeline::model
