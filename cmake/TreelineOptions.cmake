# Compile options of everything that is built here; nothing of it reaches a consumer.
add_library(treeline_options INTERFACE)
target_compile_options(treeline_options INTERFACE
  # Products are contracted to fused ones only where a kernel says so: merging must commute bitwise.
  -ffp-contract=off
  -Wall -Wextra -Wpedantic -Wshadow
  $<$<BOOL:${TREELINE_WERROR}>:-Werror>)
