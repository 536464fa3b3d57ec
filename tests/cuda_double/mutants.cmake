# Mistakes planted into our own kernels and streams, each of which the suites must see.

# ziggurat_plant(FOLDER PATH FROM TO): the source at PATH with FROM replaced by TO, as FOLDER/PATH.
function(ziggurat_plant folder path from to)
  file(READ ${PROJECT_SOURCE_DIR}/${path} text)
  string(REPLACE "${from}" "${to}" mutant "${text}")
  if(mutant STREQUAL text)
    message(FATAL_ERROR "tests/cuda_double/mutants.cmake: ${path} has no '${from}' any more: plant the mistake elsewhere")
  endif()
  file(CONFIGURE OUTPUT ${folder}/${path} CONTENT "${mutant}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${path})
endfunction()

# ziggurat_mutant_kernels(TARGET FOLDER FLAGS FILE.cu ...): kernels with includes from FOLDER first, and other flags; PTX is enough.
function(ziggurat_mutant_kernels target folder flags)
  add_library(${target} STATIC ${ARGN})
  target_include_directories(${target} BEFORE PRIVATE ${folder} ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE ziggurat_cudart)
  target_compile_options(${target} PRIVATE --expt-relaxed-constexpr --no-compress ${flags})
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES 80-virtual)
endfunction()

# ziggurat_mutant_test(NAME FILTER SAYS OBJECTS...): a program of a suite's objects over the double, whose cases fail and say so.
function(ziggurat_mutant_test name filter says)
  add_executable(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES ZIGGURAT_CUDA_DOUBLE ON)
  target_link_libraries(${name} PRIVATE ziggurat_cudart ziggurat::test_support)
  add_test(NAME ${name} COMMAND ${name} --gtest_filter=${filter})
  set_tests_properties(${name} PROPERTIES
    LABELS unit TIMEOUT ${ZIGGURAT_TEST_TIMEOUT} PASS_REGULAR_EXPRESSION "${says}")
endfunction()
