# Third-party libraries, by the names their packages give them. AUTO prints what it found; ON fails loudly.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(Boost 1.81 REQUIRED)  # Asio, header only

# Debian has no archives of these two: `portable` compiles them in. Naming both of a package's targets first makes its
# own CMake file keep ours.
if(ZIGGURAT_STATIC)
  foreach(target fmt::fmt fmt::fmt-header-only spdlog::spdlog spdlog::spdlog_header_only)
    add_library(${target} INTERFACE IMPORTED)
  endforeach()
  target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
  target_compile_definitions(spdlog::spdlog INTERFACE SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY)
endif()
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)

# find_library prefers archives under ZIGGURAT_STATIC (the `portable` preset).
if(ZIGGURAT_STATIC)
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a .so)
endif()

# ziggurat_find(NAME header library): an imported target ziggurat::3p::NAME from a header and a library.
function(ziggurat_find name header library)
  find_path(${name}_INCLUDE_DIR ${header})
  find_library(${name}_LIBRARY ${library})
  if(${name}_INCLUDE_DIR AND ${name}_LIBRARY)
    add_library(ziggurat_3p_${name} UNKNOWN IMPORTED GLOBAL)
    add_library(ziggurat::3p::${name} ALIAS ziggurat_3p_${name})
    set_target_properties(ziggurat_3p_${name} PROPERTIES
      IMPORTED_LOCATION ${${name}_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${${name}_INCLUDE_DIR})
  endif()
endfunction()

ziggurat_find(xxhash xxhash.h xxhash)
ziggurat_find(hwloc hwloc.h hwloc)
ziggurat_find(numa numa.h numa)
ziggurat_find(dnnl oneapi/dnnl/dnnl.hpp dnnl)  # its CMake package demands OpenCL
ziggurat_find(hwy hwy/highway.h hwy)
ziggurat_find(crypto openssl/hmac.h crypto)
ziggurat_find(uring liburing.h uring)
ziggurat_find(aio libaio.h aio)
ziggurat_find(seccomp seccomp.h seccomp)  # tests only
# Debian's hwloc archive wants libudev, which has no archive: without its development files the shared hwloc serves.
if(ZIGGURAT_STATIC AND hwloc_LIBRARY MATCHES "\\.a$")
  find_library(udev_LIBRARY NAMES udev)
  if(udev_LIBRARY)
    set_property(TARGET ziggurat_3p_hwloc PROPERTY INTERFACE_LINK_LIBRARIES ${udev_LIBRARY} m)
  else()
    find_library(hwloc_shared_LIBRARY NAMES libhwloc.so)
    set_property(TARGET ziggurat_3p_hwloc PROPERTY IMPORTED_LOCATION ${hwloc_shared_LIBRARY})
    message(STATUS "Ziggurat: hwloc stays shared (libudev-dev is not installed)")
  endif()
endif()
# Debian's xxHash archive lacks the run-time dispatch, without which checksums take four times as long. The shared one has it,
# and is on every Debian: apt needs it.
if(ZIGGURAT_STATIC AND xxhash_LIBRARY MATCHES "\\.a$")
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LIBRARIES ${xxhash_LIBRARY})
  check_cxx_source_compiles("extern \"C\" void XXH3_64bits_withSeed_dispatch(); int main() { XXH3_64bits_withSeed_dispatch(); }"
    ZIGGURAT_XXHASH_ARCHIVE_DISPATCHES)
  unset(CMAKE_REQUIRED_LIBRARIES)
  find_library(xxhash_shared_LIBRARY NAMES libxxhash.so)
  if(NOT ZIGGURAT_XXHASH_ARCHIVE_DISPATCHES AND xxhash_shared_LIBRARY)
    set_property(TARGET ziggurat_3p_xxhash PROPERTY IMPORTED_LOCATION ${xxhash_shared_LIBRARY})
    message(STATUS "Ziggurat: xxHash stays shared (its archive has no run-time dispatch)")
  endif()
endif()
foreach(required xxhash hwloc numa hwy dnnl crypto)
  if(NOT TARGET ziggurat_3p_${required})
    message(FATAL_ERROR "lib${required} not found: run scripts/install-packages, or see the list in it")
  endif()
endforeach()

if(ZIGGURAT_WITH_URING STREQUAL "ON" AND NOT TARGET ziggurat_3p_uring)
  message(FATAL_ERROR "ZIGGURAT_WITH_URING=ON, but liburing was not found (Debian: liburing-dev)")
endif()
set(ZIGGURAT_HAVE_URING OFF)
if(NOT ZIGGURAT_WITH_URING STREQUAL "OFF" AND TARGET ziggurat_3p_uring)
  set(ZIGGURAT_HAVE_URING ON)
endif()

if(ZIGGURAT_WITH_LIBAIO STREQUAL "ON" AND NOT TARGET ziggurat_3p_aio)
  message(FATAL_ERROR "ZIGGURAT_WITH_LIBAIO=ON, but libaio was not found (Debian: libaio-dev)")
endif()
set(ZIGGURAT_HAVE_LIBAIO OFF)
if(NOT ZIGGURAT_WITH_LIBAIO STREQUAL "OFF" AND TARGET ziggurat_3p_aio)
  set(ZIGGURAT_HAVE_LIBAIO ON)
endif()

set(ZIGGURAT_HAVE_CUDA OFF)
if(ZIGGURAT_SANITIZE AND (SKBUILD OR NOT PROJECT_IS_TOP_LEVEL))
  set(ZIGGURAT_WITH_CUDA OFF)  # no tests, so no double
endif()
if(NOT ZIGGURAT_WITH_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit)
  endif()
  if(CMAKE_CUDA_COMPILER AND TARGET CUDA::cudart_static)
    set(ZIGGURAT_HAVE_CUDA ON)
  elseif(ZIGGURAT_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ZIGGURAT_WITH_CUDA=ON, but nvcc or the static CUDA runtime was not found")
  endif()
endif()

# ziggurat_cudart: the CUDA runtime of whoever links it. Programs get the real one; a target with the property
# ZIGGURAT_CUDA_DOUBLE gets the double of tests/cuda_double, and so does every target under sanitizers, which the real one's
# memory and threads would mislead. Never both, so a function that the double lacks does not link.
if(ZIGGURAT_HAVE_CUDA)
  add_library(ziggurat_cudart INTERFACE)
  target_link_libraries(ziggurat_cudart INTERFACE CUDA::toolkit)
  if(ZIGGURAT_SANITIZE)
    target_link_libraries(ziggurat_cudart INTERFACE ziggurat_cuda_double)
  else()
    target_link_libraries(ziggurat_cudart INTERFACE
      $<IF:$<BOOL:$<TARGET_PROPERTY:ZIGGURAT_CUDA_DOUBLE>>,ziggurat_cuda_double,CUDA::cudart_static>)
  endif()
endif()

# Its header only: the library is opened at run time. scripts/fetch-nccl brings the Python wheel's.
set(ZIGGURAT_HAVE_NCCL OFF)
if(ZIGGURAT_HAVE_CUDA AND NOT ZIGGURAT_WITH_NCCL STREQUAL "OFF")
  find_path(nccl_INCLUDE_DIR nccl.h HINTS ${PROJECT_SOURCE_DIR}/build/nccl/nvidia/nccl/include)
  if(nccl_INCLUDE_DIR)
    add_library(ziggurat_3p_nccl INTERFACE IMPORTED GLOBAL)
    add_library(ziggurat::3p::nccl ALIAS ziggurat_3p_nccl)
    target_include_directories(ziggurat_3p_nccl INTERFACE ${nccl_INCLUDE_DIR})
    set(ZIGGURAT_HAVE_NCCL ON)
  endif()
endif()
if(ZIGGURAT_WITH_NCCL STREQUAL "ON" AND NOT ZIGGURAT_HAVE_NCCL)
  message(FATAL_ERROR "ZIGGURAT_WITH_NCCL=ON, but CUDA or nccl.h was not found (scripts/fetch-nccl brings the header)")
endif()

set(ZIGGURAT_HAVE_MPI OFF)
if(NOT ZIGGURAT_WITH_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(ZIGGURAT_HAVE_MPI ON)
  elseif(ZIGGURAT_WITH_MPI STREQUAL "ON")
    message(FATAL_ERROR "ZIGGURAT_WITH_MPI=ON, but no MPI was found (Debian: libopenmpi-dev)")
  endif()
endif()
message(STATUS "Ziggurat: io_uring ${ZIGGURAT_HAVE_URING}, libaio ${ZIGGURAT_HAVE_LIBAIO}, CUDA ${ZIGGURAT_HAVE_CUDA}, MPI ${ZIGGURAT_HAVE_MPI}, NCCL ${ZIGGURAT_HAVE_NCCL}")
