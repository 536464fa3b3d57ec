# What a builder may choose, and the flags that every target of ours gets.
set(ZIGGURAT_WITH_CUDA AUTO CACHE STRING "CUDA device: AUTO (if nvcc is found), ON (or fail), OFF")
set(ZIGGURAT_WITH_URING AUTO CACHE STRING "io_uring: AUTO (if liburing is found), ON (or fail), OFF")
set(ZIGGURAT_WITH_LIBAIO AUTO CACHE STRING "libaio: AUTO (if it is found), ON (or fail), OFF")
set(ZIGGURAT_WITH_MPI AUTO CACHE STRING "Ranks over MPI: AUTO (if mpi.h is found), ON (or fail), OFF")
set(ZIGGURAT_WITH_NCCL AUTO CACHE STRING "Ranks over NCCL: AUTO (if CUDA and nccl.h are found), ON (or fail), OFF")
set_property(CACHE ZIGGURAT_WITH_CUDA ZIGGURAT_WITH_URING ZIGGURAT_WITH_LIBAIO ZIGGURAT_WITH_MPI
  ZIGGURAT_WITH_NCCL PROPERTY STRINGS AUTO ON OFF)
option(ZIGGURAT_WERROR "Warnings are errors" ${PROJECT_IS_TOP_LEVEL})
option(ZIGGURAT_STATIC "Link third-party libraries statically where an archive exists" OFF)
option(ZIGGURAT_UNITY "Compile a library's files eight at a time, in less than half of the time; OFF suits who edits them" ON)
option(ZIGGURAT_FUZZ "Build the fuzz targets, in place of the tests: Clang alone has libFuzzer" OFF)
set(ZIGGURAT_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize=")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

# ziggurat::flags: linked PRIVATE by every target of ours.
add_library(ziggurat_flags INTERFACE)
add_library(ziggurat::flags ALIAS ziggurat_flags)
target_compile_options(ziggurat_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual>
  # Specified arithmetic is never fused (style: numerics).
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  # GCC collects its garbage from 512 MiB on: a sixth of the time to compile, for some 300 MB a process.
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=524288>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${ZIGGURAT_WERROR}>>:-Werror>)

# Every program and test lands in one place: build/<preset>/bin/ziggurat.
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
endif()

if(ZIGGURAT_STATIC)
  add_link_options(-static-libstdc++ -static-libgcc)
endif()

if(ZIGGURAT_SANITIZE)
  # A kernel's host part is a stub of nvcc's, and nvcc does not know these.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ZIGGURAT_SANITIZE};-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${ZIGGURAT_SANITIZE})
  if(ZIGGURAT_SANITIZE MATCHES "address")
    string(APPEND CMAKE_EXE_LINKER_FLAGS " -no-pie")  # relocations of all that UBSan notes would be half of each program
  endif()
  if(ZIGGURAT_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>)  # GCC warns that TSan ignores fences; Asio has some
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-mismatched-new-delete>)  # GCC 12 misreads some coroutine frames
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)  # nor does it follow std::regex among the checks
  endif()
  # hwloc unloads its PCI plugin, and with it the only pointer to what this library has allocated. Linked, it stays.
  if(ZIGGURAT_SANITIZE MATCHES "address")
    find_library(ZIGGURAT_PCIACCESS NAMES pciaccess libpciaccess.so.0)
    mark_as_advanced(ZIGGURAT_PCIACCESS)
    if(ZIGGURAT_PCIACCESS)
      link_libraries(-Wl,--push-state,--no-as-needed ${ZIGGURAT_PCIACCESS} -Wl,--pop-state)
    endif()
  endif()
endif()

# Some 300 programs are linked, each in a third of the time.
find_program(MOLD_PROGRAM mold)
mark_as_advanced(MOLD_PROGRAM)
if(MOLD_PROGRAM AND NOT ZIGGURAT_STATIC)
  add_link_options($<$<LINK_LANGUAGE:CXX>:-fuse-ld=mold>)
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)  # it caches what reads precompiled headers only so
    list(PREPEND CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros)
    target_compile_options(ziggurat_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  endif()
endif()

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH ZIGGURAT_ROOT)

# ziggurat_library(NAME HEADERS ... SOURCES ... USES ...): one static library per folder, alias ziggurat::NAME.
function(ziggurat_library name)
  cmake_parse_arguments(ARG "" "" "HEADERS;SOURCES;USES;PRIVATE_USES" ${ARGN})
  add_library(ziggurat_${name} STATIC)
  add_library(ziggurat::${name} ALIAS ziggurat_${name})
  target_sources(ziggurat_${name}
    PUBLIC FILE_SET HEADERS BASE_DIRS ${ZIGGURAT_ROOT} FILES ${ARG_HEADERS}
    PRIVATE ${ARG_SOURCES})
  target_include_directories(ziggurat_${name} PUBLIC $<BUILD_INTERFACE:${ZIGGURAT_ROOT}>)
  target_link_libraries(ziggurat_${name} PUBLIC ${ARG_USES} PRIVATE ziggurat::flags ${ARG_PRIVATE_USES})
  ziggurat_reads_precompiled(ziggurat_${name} ziggurat_precompiled)
  ziggurat_unite(ziggurat_${name} ${ARG_SOURCES})
endfunction()

# ziggurat_unite(TARGET SOURCES...): compiles the target's sources eight at a time, unless ZIGGURAT_UNITY is OFF.
function(ziggurat_unite target)
  if(NOT ZIGGURAT_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON)
  # GCC takes a file that includes others for a header, whose types others would read.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  foreach(source ${ARGN})
    cmake_path(ABSOLUTE_PATH source)
    if(source MATCHES "\\.cu?c?$" AND EXISTS ${source})
      file(STRINGS ${source} by_itself REGEX "foreach_target" LIMIT_COUNT 1)  # a SIMD kernel, which includes itself
      cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${ZIGGURAT_ROOT} OUTPUT_VARIABLE path)
      if(by_itself OR (path MATCHES "cuda" AND NOT path MATCHES "^tests/core/"))  # tests link mutants of these in their place
        set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
      endif()
    endif()
  endforeach()
endfunction()
