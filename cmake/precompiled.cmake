# Headers of other people, parsed once a build instead of once a file. CMAKE_DISABLE_PRECOMPILE_HEADERS=ON builds without.
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/precompiled.cc CONTENT "// Only its precompiled header is of use.\n")

# ziggurat_precompile(TARGET HEADERS ... USES ...): what ziggurat_reads_precompiled(... TARGET) reads.
function(ziggurat_precompile target)
  cmake_parse_arguments(ARG "" "" "HEADERS;USES" ${ARGN})
  add_library(${target} OBJECT ${PROJECT_BINARY_DIR}/precompiled.cc)
  target_link_libraries(${target} PRIVATE ziggurat::flags fmt::fmt Boost::headers nlohmann_json::nlohmann_json
    Threads::Threads ${ARG_USES})
  target_precompile_headers(${target} PRIVATE ${ARG_HEADERS})
endfunction()

function(ziggurat_reads_precompiled target from)
  if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)  # of which CMake would warn
    target_precompile_headers(${target} REUSE_FROM ${from})
  endif()
endfunction()

ziggurat_precompile(ziggurat_precompiled HEADERS ${PROJECT_SOURCE_DIR}/cmake/precompiled.h)
