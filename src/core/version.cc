#include "treeline/version.h"

namespace treeline {

std::string_view Version() { return TREELINE_VERSION; }

}  // namespace treeline
