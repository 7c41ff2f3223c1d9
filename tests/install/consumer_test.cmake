# Installs the build tree, moves the result to another place, and there builds a consumer from
# scratch and runs it.
#
# cmake -D BUILD_DIR=… -D CONFIG=…     what is installed
#       -D CONSUMER_DIR=…              a project that builds a program of the same name
#       -D WORK_DIR=…                  emptied first
#       -D PKG_CONFIG=…                builds main.c by pkg-config instead of CMake
#       -D GENERATOR=… -D MAKE_PROGRAM=… -D C_COMPILER=… -D CXX_COMPILER=… -D C_FLAGS=… -D CXX_FLAGS=…
#       -D MPIEXEC=…                   starts the program as 3 processes
#       -D LINKER_FLAGS=… -D HWY_DIR=…    as in the build tree
#       -P consumer_test.cmake

set(prefix "${WORK_DIR}/moved")
file(REMOVE_RECURSE "${WORK_DIR}")
file(MAKE_DIRECTORY "${WORK_DIR}")

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run("${CMAKE_COMMAND}" -E env --unset=DESTDIR
    "${CMAKE_COMMAND}" --install "${BUILD_DIR}" --config "${CONFIG}" --prefix "${WORK_DIR}/first")
file(RENAME "${WORK_DIR}/first" "${prefix}")

# A path into this machine's folders would break a package that is moved to another one.
file(GLOB_RECURSE texts "${prefix}/*.cmake" "${prefix}/*.pc" "${prefix}/*.h")
foreach(text IN LISTS texts)
  file(READ "${text}" content)
  foreach(folder IN ITEMS "${BUILD_DIR}" "${CMAKE_CURRENT_LIST_DIR}" treeline_options)
    string(FIND "${content}" "${folder}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${text} names ${folder}")
    endif()
  endforeach()
endforeach()

cmake_path(GET CONSUMER_DIR FILENAME name)
# Installed headers are held to the same warnings as their users.
set(warnings "-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror")
if(PKG_CONFIG)
  file(GLOB_RECURSE package "${prefix}/*/treeline.pc")
  cmake_path(GET package PARENT_PATH package_dir)
  set(search "${package_dir}:$ENV{PKG_CONFIG_PATH}")
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env "PKG_CONFIG_PATH=${search}"
                          "${PKG_CONFIG}" --cflags --libs treeline
                  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(arguments UNIX_COMMAND
    "${C_FLAGS} ${warnings} -std=c99 ${CONSUMER_DIR}/main.c ${flags} ${LINKER_FLAGS}")
  file(MAKE_DIRECTORY "${WORK_DIR}/bin")
  run("${C_COMPILER}" ${arguments} -o "${WORK_DIR}/bin/${name}")
  cmake_path(GET package_dir PARENT_PATH lib_dir)
  set(ENV{LD_LIBRARY_PATH} "${lib_dir}:$ENV{LD_LIBRARY_PATH}")  # pkg-config gives no run path
else()
  run("${CMAKE_COMMAND}" -S "${CONSUMER_DIR}" -B "${WORK_DIR}/build" -G "${GENERATOR}"
      "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
      "-DCMAKE_C_COMPILER=${C_COMPILER}"
      "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}"
      "-DCMAKE_C_FLAGS=${C_FLAGS} ${warnings}"
      "-DCMAKE_CXX_FLAGS=${CXX_FLAGS} ${warnings}"
      "-DCMAKE_EXE_LINKER_FLAGS=${LINKER_FLAGS}"
      "-DCMAKE_BUILD_TYPE=${CONFIG}"
      "-DCMAKE_PREFIX_PATH=${prefix}"
      "-DCMAKE_NO_SYSTEM_FROM_IMPORTED=ON"
      "-DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$<1:${WORK_DIR}/bin>"
      "-Dhwy_DIR=${HWY_DIR}")
  run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --config "${CONFIG}")
endif()
if(MPIEXEC)
  set(launcher "${MPIEXEC}" -n 3)
endif()
run(${launcher} "${WORK_DIR}/bin/${name}")
