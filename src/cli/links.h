#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

#include "treeline/cost.h"

namespace treeline::cli {

// Links of a cost model, as JSON: {"within": {"latency_us": …, "gbps": …}, "between": {…}}.
nlohmann::ordered_json LinksToJson(const CostModel& model);

using Links = std::pair<LinkCost, LinkCost>;  // within a node, and between nodes

// From a file that holds such an object, or what `treeline info --comm --json` writes. Throws
// FormatError if it does not.
Links ReadLinks(const std::string& file);

}  // namespace treeline::cli
