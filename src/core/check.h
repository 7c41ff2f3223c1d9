#pragma once

#include <sstream>

#include "treeline/errors.h"

namespace treeline {

// Throws E with the parts written one after the other.
template <class E, class... Parts>
[[noreturn]] void Throw(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw E(message.str());
}

// Throws ArgumentError unless `condition` holds.
template <class... Parts>
void Require(bool condition, const Parts&... parts) {
  if (!condition) Throw<ArgumentError>(parts...);
}

}  // namespace treeline
