#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "treeline/cost.h"

namespace treeline::cli {

// Links of a cost model, as JSON: {"within": {"latency_us": …, "gbps": …}, "between": {…}}.
nlohmann::ordered_json LinksToJson(const CostModel& model);

// Replaces a model's links by those of a file: such an object, or what `treeline info --comm
// --json` writes. Does nothing for "". Throws FormatError if the file is none.
void ReadLinks(const std::string& file, CostModel& model);

}  // namespace treeline::cli
