#pragma once

#include <string_view>

namespace treeline {

// Of the library, as "major.minor.patch".
std::string_view Version();

}  // namespace treeline
