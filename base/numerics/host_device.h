// SPDX-License-Identifier: Apache-2.0
// base/numerics/host_device.h: marks a function that runs on a CPU and in a CUDA kernel. So the
// specification is written once, and each compiler makes its own machine's code of it.
//
// A constexpr function needs no mark, because nvcc gets --expt-relaxed-constexpr. Neither compiler
// fuses a product with a sum (-ffp-contract=off, --fmad=false). Headers that kernels include must
// not include base/check.h, because nvcc does not compile fmt.
#pragma once

#if defined(__CUDACC__)
#define ZIGGURAT_HOST_DEVICE __host__ __device__
#else
#define ZIGGURAT_HOST_DEVICE
#endif
