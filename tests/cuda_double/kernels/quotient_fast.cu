// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/quotient_fast.cu: product_sum.h with --use_fast_math.
#include "tests/cuda_double/kernels/product_sum.h"

namespace ziggurat::cuda_double {

void launch_quotient_fast(const float* xyz, float* out, unsigned count, cudaStream_t stream) {
  quotient_kernel<<<(count + 127) / 128, 128, 0, stream>>>(xyz, out, count);
}

}  // namespace ziggurat::cuda_double
