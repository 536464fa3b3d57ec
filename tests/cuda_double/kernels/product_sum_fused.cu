// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/product_sum_fused.cu: product_sum.h with nvcc's own default, which
// fuses.
#include "tests/cuda_double/kernels/product_sum.h"

namespace ziggurat::cuda_double {

void launch_product_sum_fused(const float* xyz, float* out, unsigned count, cudaStream_t stream) {
  product_sum_kernel<<<(count + 127) / 128, 128, 0, stream>>>(xyz, out, count);
}

}  // namespace ziggurat::cuda_double
