# Writes OUTPUT, a header that says which build this is. Run at build time.
execute_process(COMMAND git -C "${SOURCE}" describe --always --dirty
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown commit")
endif()
file(CONFIGURE OUTPUT "${OUTPUT}" @ONLY CONTENT [[#pragma once

namespace treeline::cli {
inline constexpr char kCommit[] = "@commit@";
inline constexpr char kCompiler[] = "@COMPILER@";
}  // namespace treeline::cli
]])
