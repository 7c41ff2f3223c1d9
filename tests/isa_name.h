#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "treeline/isa.h"

namespace treeline {

// Names tests by their instruction set; names of tests have no hyphens.
inline std::string IsaName(const testing::TestParamInfo<Isa>& info) {
  std::string name(Name(info.param));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace treeline
