#include "model/context_manifest.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace treeline::model {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "treeline context";
constexpr std::int64_t kVersion = 1;
// As many as a layout takes, and far more than there are.
constexpr std::size_t kMostRanks = std::size_t{1} << 20;

// What ends the text, so that it can be checked before its values are used.
std::string Tail(std::string_view body) {
  return ",\"checksum\":\"" + Hex(ContextChecksum(std::as_bytes(std::span(body)))) + "\"}\n";
}

bool IsWhole(std::string_view text) {
  const std::size_t tail = Tail({}).size();
  return text.size() > tail &&
         text.substr(text.size() - tail) == Tail(text.substr(0, text.size() - tail));
}

// A value in a message. Lists may be long, and too deep for dump's recursion.
std::string Show(const Json& value) {
  constexpr std::size_t kMost = 80;
  return value.is_structured() ? value.type_name() : value.dump().substr(0, kMost);
}

// Values of an object, or a FormatError.
class Fields {
 public:
  Fields(const Json& object, const std::string& path) : object_(object), path_(path) {}

  template <class... Parts>
  [[noreturn]] void Fail(const Parts&... parts) const {
    Throw<FormatError>("'", path_, "': ", parts...);
  }
  const Json& Get(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) Fail("it has no ", key);
    return *found;
  }
  std::int64_t Whole(const Json& value, const char* key, std::int64_t most) const {
    // Signed if it is below 0.
    if (!value.is_number_unsigned() ||
        value.get<std::uint64_t>() > static_cast<std::uint64_t>(most)) {
      Fail(key, " is ", Show(value), "; it must be a whole number from 0 to ", most);
    }
    return value.get<std::int64_t>();
  }
  std::int64_t Whole(const char* key, std::int64_t most) const {
    return Whole(Get(key), key, most);
  }
  const std::string& Text(const char* key) const {
    const Json& value = Get(key);
    if (!value.is_string()) Fail(key, " is ", Show(value), "; it must be a text");
    return value.get_ref<const std::string&>();
  }
  std::uint64_t Hash(const Json& value, const char* key) const {
    std::uint64_t hash = 0;
    if (value.is_string()) {
      const std::string& text = value.get_ref<const std::string&>();
      std::from_chars(text.data(), text.data() + text.size(), hash, 16);
      if (text == Hex(hash)) return hash;
    }
    Fail(key, " is ", Show(value), "; it must be 16 digits");
  }
  const Json& List(const char* key, std::size_t least, std::size_t most) const {
    const Json& value = Get(key);
    if (!value.is_array() || value.size() < least || value.size() > most) {
      Fail(key, " must be a list of ", least, " to ", most, " values");
    }
    return value;
  }

 private:
  const Json& object_;
  const std::string& path_;
};

ContextManifest::Shard ParseShard(const Json& json, const Fields& context,
                                  const std::string& path) {
  if (!json.is_object()) context.Fail("a shard is ", Show(json), "; it must be an object");
  const Fields fields(json, path);
  ContextManifest::Shard shard;
  shard.file = fields.Text("file");
  // A name alone, so that no file elsewhere is read.
  if (!IsShardName(shard.file)) {
    fields.Fail("file is ", Show(json["file"]), "; it must be the name of a shard");
  }
  for (const Json& sum : fields.List("checksums", 0, std::numeric_limits<int>::max())) {
    shard.checksums.push_back(fields.Hash(sum, "a checksum"));
  }
  return shard;
}

}  // namespace

std::uint64_t ContextChecksum(std::span<const std::byte> bytes) {
  std::uint64_t hash = 14695981039346656037u;
  const auto mix = [&](std::uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  };
  // Whole words: bytes one by one would take longer than the disk.
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, &bytes[i], 8);
    mix(word);
  }
  for (; i < bytes.size(); ++i) mix(static_cast<std::uint64_t>(bytes[i]));
  return hash;
}

std::string Hex(std::uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

bool IsShardName(std::string_view name) {
  return name.starts_with("shard-") && name.ends_with(".kv") &&
         std::ranges::all_of(name, [](char c) {
           return c == '-' || c == '.' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z');
         });
}

std::string SealManifest(std::string object) {
  object.pop_back();
  return object + Tail(object);
}

std::string FormatManifest(const ContextManifest& manifest) {
  nlohmann::ordered_json shards = nlohmann::ordered_json::array();
  for (const ContextManifest::Shard& shard : manifest.shards) {
    nlohmann::ordered_json sums = nlohmann::ordered_json::array();
    for (const std::uint64_t sum : shard.checksums) sums.push_back(Hex(sum));
    shards.push_back({{"file", shard.file}, {"checksums", std::move(sums)}});
  }
  const nlohmann::ordered_json json{{"format", kFormat},
                                    {"version", kVersion},
                                    {"model", Hex(manifest.model)},
                                    {"model_name", manifest.model_name},
                                    {"kv_type", manifest.kv_type},
                                    {"first_rank", manifest.first_rank},
                                    {"shards", std::move(shards)},
                                    {"tokens", manifest.tokens}};
  // A model's name may be no UTF-8.
  return SealManifest(json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

ContextManifest ParseManifest(std::string_view text, const std::string& path) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Fields fields(json, path);
  if (!json.is_object() || json.value("format", Json()) != kFormat) {
    fields.Fail("this is no saved context");
  }
  // First of all: another version may be sealed in another way.
  const std::int64_t version = fields.Whole("version", std::numeric_limits<std::int32_t>::max());
  if (version != kVersion) fields.Fail("it has version ", version, "; supported is ", kVersion);
  if (!IsWhole(text)) fields.Fail("it is damaged: its checksum is not that of its text");

  ContextManifest manifest;
  manifest.model = fields.Hash(fields.Get("model"), "model");
  manifest.model_name = fields.Text("model_name");
  manifest.kv_type = fields.Text("kv_type");
  for (const Json& shard : fields.List("shards", 1, kMostRanks)) {
    manifest.shards.push_back(ParseShard(shard, fields, path));
  }
  manifest.first_rank = static_cast<int>(
      fields.Whole("first_rank", static_cast<std::int64_t>(manifest.shards.size()) - 1));
  constexpr Token kMostToken = std::numeric_limits<Token>::max();
  for (const Json& token : fields.List("tokens", 1, std::size_t{1} << 32)) {
    manifest.tokens.push_back(static_cast<Token>(fields.Whole(token, "a token", kMostToken)));
  }
  return manifest;
}

void RequireModel(const ContextManifest& manifest, const LlamaModel& model, DType kv_type,
                  const std::string& path) {
  if (manifest.model != model.fingerprint()) {
    Throw<FormatError>("'", path, "': it was saved by another model, '", manifest.model_name,
                       "'; this is '", model.shape().name, "'");
  }
  if (manifest.kv_type != Name(kv_type)) {
    Throw<FormatError>("'", path, "': its keys and values are ", manifest.kv_type, ", not ",
                       Name(kv_type));
  }
  const Token most = std::ranges::max(manifest.tokens);
  if (most >= model.shape().vocabulary) {
    Throw<FormatError>("'", path, "': token ", most, " is none of the model, which has ",
                       model.shape().vocabulary);
  }
}

}  // namespace treeline::model
