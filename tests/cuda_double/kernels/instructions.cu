// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/instructions.cu: the rules of instructions.h, an element a thread.
#include "tests/cuda_double/kernels/apply_rule.h"
#include "tests/cuda_double/kernels/launch.h"

namespace ziggurat::cuda_double {
namespace {

__global__ void rule_kernel(Rule rule, const std::uint64_t* x, const std::uint64_t* y,
                            std::uint64_t* out, std::uint32_t count) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = apply(rule, x[i], y[i]);
}

/// Blocks of 256: a sum in shared memory, then by shuffles; the same tree as sum_of_block().
__global__ void sum_kernel(const float* x, float* sums) {
  __shared__ float part[256];
  const unsigned thread = threadIdx.x;
  part[thread] = x[blockIdx.x * 256 + thread];
  __syncthreads();
  for (unsigned half = 128; half >= 32; half /= 2) {
    if (thread < half) part[thread] = part[thread] + part[thread + half];
    __syncthreads();
  }
  if (thread >= 32) return;
  float sum = part[thread];
  for (int step = 16; step > 0; step /= 2) {
    sum = sum + __shfl_down_sync(0xffffffffu, sum, step);
  }
  if (thread == 0) sums[blockIdx.x] = sum;
}

__device__ unsigned scale_table[4] = {1, 10, 100, 1000};

__global__ void histogram_kernel(const std::uint8_t* x, unsigned* bins, unsigned count) {
  __shared__ unsigned local[4];
  if (threadIdx.x < 4) local[threadIdx.x] = 0;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    atomicAdd(&local[x[i] % 4], scale_table[x[i] % 4]);
  }
  __syncthreads();
  if (threadIdx.x < 4) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
  if (__any_sync(0xffffffffu, x[0] == 255) && threadIdx.x == 0) atomicOr(&bins[4], 1u);
}

}  // namespace

void launch_rule(Rule rule, const std::uint64_t* x, const std::uint64_t* y, std::uint64_t* out,
                 std::uint32_t count, cudaStream_t stream) {
  rule_kernel<<<(count + 127) / 128, 128, 0, stream>>>(rule, x, y, out, count);
}
void launch_sum(const float* x, float* sums, unsigned blocks, cudaStream_t stream) {
  sum_kernel<<<blocks, 256, 0, stream>>>(x, sums);
}
void launch_histogram(const std::uint8_t* x, unsigned* bins, unsigned count, cudaStream_t stream) {
  histogram_kernel<<<3, 64, 0, stream>>>(x, bins, count);
}

}  // namespace ziggurat::cuda_double
