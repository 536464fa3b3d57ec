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
ziggurat_find(uring liburing.h uring)
if(ZIGGURAT_STATIC AND hwloc_LIBRARY MATCHES "\\.a$")  # Debian's archive wants what its shared library carries
  find_library(udev_LIBRARY udev)
  if(udev_LIBRARY)
    set_property(TARGET ziggurat_3p_hwloc PROPERTY INTERFACE_LINK_LIBRARIES ${udev_LIBRARY} m)
  endif()
endif()
foreach(required xxhash hwloc numa hwy dnnl)
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

set(ZIGGURAT_HAVE_CUDA OFF)
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
message(STATUS "Ziggurat: io_uring ${ZIGGURAT_HAVE_URING}, CUDA ${ZIGGURAT_HAVE_CUDA}")
