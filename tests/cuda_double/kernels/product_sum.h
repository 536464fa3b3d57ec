// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/product_sum.h: one kernel, compiled three times with other flags.
#pragma once

#include "tests/cuda_double/kernels/launch.h"

namespace ziggurat::cuda_double {
namespace {

__global__ void product_sum_kernel(const float* xyz, float* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = xyz[i] * xyz[count + i] + xyz[2 * count + i];
}

__global__ void quotient_kernel(const float* xyz, float* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = xyz[i] / xyz[count + i];
}

}  // namespace
}  // namespace ziggurat::cuda_double
