# CUDA kernels: one set of flags for all, because their bits are specified.
if(ZIGGURAT_HAVE_CUDA)
  # Machine code for sm_80, and PTX that the driver compiles for whatever is newer; scripts/check-gpu-architectures compiles for
  # all, and the wheel has code for all (pyproject.toml).
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # ziggurat_cudart says which one
  enable_language(CUDA)
endif()

# Never fused, and constexpr functions are the device's too (base/numerics/host_device.h); the PTX stays readable in the object,
# for tests; registers that spill are an error. scripts/check-gpu-architectures reads these lines.
set(ZIGGURAT_KERNEL_FLAGS
  --fmad=false
  --expt-relaxed-constexpr
  --no-compress
  -Xptxas=-warn-spills,-Werror
  -Xcompiler=-ffp-contract=off
  -Werror=all-warnings)

# ziggurat_add_kernels(TARGET FILE.cu ...): kernels into a library that exists.
function(ziggurat_add_kernels target)
  target_sources(${target} PRIVATE ${ARGN})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${ZIGGURAT_KERNEL_FLAGS}>")
  target_link_libraries(${target} PRIVATE ziggurat_cudart)
  set_property(GLOBAL APPEND PROPERTY ZIGGURAT_KERNEL_TARGETS ${target})
endfunction()
