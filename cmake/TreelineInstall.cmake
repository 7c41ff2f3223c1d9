# cmake --install: the headers, the library, a CMake package and a pkg-config file. All of it can be
# moved: no file names the place it was installed to.
include(CMakePackageConfigHelpers)

set_target_properties(treeline PROPERTIES
  # While the major version is 0, a minor one may break its users.
  VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  # The C++ API stays visible in a project that hides its own symbols.
  CXX_VISIBILITY_PRESET default
  VISIBILITY_INLINES_HIDDEN OFF
  # A Highway that the loader does not find by itself is found where it was linked.
  INSTALL_RPATH_USE_LINK_PATH ON)

# Installed programs find a shared library next to them. Holds for targets added after this file.
if(BUILD_SHARED_LIBS)
  file(RELATIVE_PATH lib_from_bin "${CMAKE_INSTALL_FULL_BINDIR}" "${CMAKE_INSTALL_FULL_LIBDIR}")
  set(CMAKE_INSTALL_RPATH "\$ORIGIN/${lib_from_bin}")
endif()

install(TARGETS treeline EXPORT treelineTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/treeline"
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/treeline")
configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/treelineConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/package/treelineConfig.cmake"
  INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/package/treelineConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/package/treelineConfig.cmake"
              "${PROJECT_BINARY_DIR}/package/treelineConfigVersion.cmake"
        DESTINATION "${package_dir}")
install(EXPORT treelineTargets NAMESPACE treeline:: DESTINATION "${package_dir}")

# Component mpi, apart from the rest: who does not ask for it needs no MPI.
if(TARGET treeline_mpi)
  set_target_properties(treeline_mpi PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  install(TARGETS treeline_mpi EXPORT treelineMpiTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
          RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(EXPORT treelineMpiTargets NAMESPACE treeline:: DESTINATION "${package_dir}")
endif()

# For pkg-config. Whoever links the static library also links what it needs: Highway, threads, and
# from C the C++ runtime.
set(pc_requires "")
set(pc_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(pc_requires "libhwy")
  set(runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
  list(REMOVE_ITEM runtime ${CMAKE_C_IMPLICIT_LINK_LIBRARIES})
  list(REMOVE_DUPLICATES runtime)
  list(TRANSFORM runtime PREPEND "-l")
  list(JOIN runtime " " pc_libs)
  string(STRIP "${pc_libs} ${CMAKE_THREAD_LIBS_INIT}" pc_libs)
endif()
# Absolute folders replace the prefix, relative ones follow it.
set(pc_libdir "\${prefix}")
set(pc_includedir "\${prefix}")
cmake_path(APPEND pc_libdir "${CMAKE_INSTALL_LIBDIR}")
cmake_path(APPEND pc_includedir "${CMAKE_INSTALL_INCLUDEDIR}")
file(RELATIVE_PATH pc_prefix "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
configure_file("${CMAKE_CURRENT_LIST_DIR}/treeline.pc.in"
               "${PROJECT_BINARY_DIR}/package/treeline.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/package/treeline.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
