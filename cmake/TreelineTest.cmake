# treeline_add_test(<name> LABEL <label> SOURCES <file>…): one GoogleTest program, one CTest entry per
# test case in it. Labels: unit, ranks, mpi, cluster, gpu-emulated, python. COMPUTES: the test itself
# takes long enough to be optimised where the library is.
include(GoogleTest)
find_package(GTest REQUIRED)
find_package(rapidcheck REQUIRED CONFIG)

set(TREELINE_TEST_SOURCES "" CACHE INTERNAL "test sources that are registered")

function(treeline_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "COMPUTES" "LABEL" "SOURCES;LIBRARIES")
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE treeline treeline_options GTest::gtest_main
                                        ${arg_LIBRARIES})
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)  # compiles longer than it runs
  if(arg_COMPUTES)
    target_compile_options(${name} PRIVATE ${TREELINE_LIBRARY_FLAGS})
  endif()
  # Values would show as raw bytes, padding included; names of instances say what they are.
  gtest_discover_tests(${name} NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS ${arg_LABEL} TIMEOUT 600)
  treeline_register_test_source(${arg_SOURCES})
endfunction()

# Says that a program has these sources.
function(treeline_register_test_source)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  set(TREELINE_TEST_SOURCES ${TREELINE_TEST_SOURCES} ${ARGN}
      CACHE INTERNAL "test sources that are registered")
endfunction()

# Fails the build if a *_test.cc below the current folder is in no program.
function(treeline_require_all_tests_registered)
  file(GLOB_RECURSE found CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*_test.cc")
  list(REMOVE_ITEM found ${TREELINE_TEST_SOURCES})
  if(found)
    message(FATAL_ERROR "test files that no treeline_add_test names: ${found}")
  endif()
endfunction()
