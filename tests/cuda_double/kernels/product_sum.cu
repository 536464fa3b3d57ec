// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/product_sum.cu: product_sum.h as the project compiles kernels.
#include "tests/cuda_double/kernels/product_sum.h"

namespace ziggurat::cuda_double {

void launch_product_sum(const float* xyz, float* out, unsigned count, cudaStream_t stream) {
  product_sum_kernel<<<(count + 127) / 128, 128, 0, stream>>>(xyz, out, count);
}

const void* product_sum_stub() { return reinterpret_cast<const void*>(&product_sum_kernel); }

}  // namespace ziggurat::cuda_double
