#include "cli/links.h"

#include <nlohmann/json.hpp>

#include "cli/prompts.h"
#include "core/check.h"

namespace treeline::cli {
namespace {

nlohmann::ordered_json ToJson(const LinkCost& link) {
  return {{"latency_us", link.latency * 1e6}, {"gbps", link.bytes_per_second / 1e9}};
}

double Number(const std::string& file, const nlohmann::json& link, const char* level,
              const char* key, double most) {
  const nlohmann::json value =
      link.is_object() ? link.value(key, nlohmann::json()) : nlohmann::json();
  if (!value.is_number() || !(value.get<double>() > 0.0) || value.get<double>() > most) {
    Throw<FormatError>("'", file, "': ", level, ".", key, " is ", value.dump(),
                       "; it must be a number above 0 and up to ", most);
  }
  return value.get<double>();
}

LinkCost Link(const std::string& file, const nlohmann::json& links, const char* level) {
  const nlohmann::json link = links.value(level, nlohmann::json());
  return {.latency = Number(file, link, level, "latency_us", 1e9) / 1e6,
          .bytes_per_second = Number(file, link, level, "gbps", 1e6) * 1e9};
}

}  // namespace

nlohmann::ordered_json LinksToJson(const CostModel& model) {
  return {{"within", ToJson(model.within)}, {"between", ToJson(model.between)}};
}

Links ReadLinks(const std::string& file) {
  const nlohmann::json json =
      nlohmann::json::parse(ReadText(file), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) Throw<FormatError>("'", file, "' is no JSON object");
  const nlohmann::json links = json.value("comm", json);
  if (!links.is_object()) Throw<FormatError>("'", file, "': comm is no object");
  return {Link(file, links, "within"), Link(file, links, "between")};
}

}  // namespace treeline::cli
