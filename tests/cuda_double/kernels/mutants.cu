// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/mutants.cu: kernels with a mistake in each.
#include "tests/cuda_double/kernels/launch.h"

namespace ziggurat::cuda_double {
namespace {

__global__ void without_barrier_kernel(const float* x, float* out) {
  __shared__ float part[64];
  part[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = part[63 - threadIdx.x];  // the other warp's
}

__global__ void one_too_many_kernel(const float* x, float* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= count) out[i] = x[i];
}

__global__ void barrier_in_branch_kernel(float* out) {
  __shared__ float part[64];
  if (threadIdx.x < 40) {
    part[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = part[39 - threadIdx.x];
  } else {
    part[threadIdx.x] = 2;
    __syncthreads();
    out[threadIdx.x] = part[40];
  }
}

__global__ void shuffle_from_nobody_kernel(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, out[threadIdx.x], 8);
}

__global__ void misaligned_kernel(const std::uint8_t* x, float* out) {
  out[0] = *reinterpret_cast<const float*>(x + 1);
}

/// Halves in place: a block may write where another still reads.
__global__ void overtaken_kernel(float* x) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = x[i];
  reinterpret_cast<std::uint16_t*>(x)[i] = static_cast<std::uint16_t>(__float_as_uint(value) >> 16);
}

__global__ void flag_kernel(unsigned* flag, bool strong) {
  if (threadIdx.x != 0) return;
  if (strong) {
    *static_cast<volatile unsigned*>(flag) = 1;
  } else {
    *flag = 1;
  }
}

}  // namespace

void launch_without_barrier(const float* x, float* out, cudaStream_t stream) {
  without_barrier_kernel<<<1, 64, 0, stream>>>(x, out);
}
void launch_one_too_many(const float* x, float* out, unsigned count, cudaStream_t stream) {
  one_too_many_kernel<<<(count + 63) / 64 + 1, 64, 0, stream>>>(x, out, count);
}
void launch_barrier_in_branch(float* out, cudaStream_t stream) {
  barrier_in_branch_kernel<<<1, 64, 0, stream>>>(out);
}
void launch_shuffle_from_nobody(float* out, cudaStream_t stream) {
  shuffle_from_nobody_kernel<<<1, 32, 0, stream>>>(out);
}
void launch_misaligned(const std::uint8_t* x, float* out, cudaStream_t stream) {
  misaligned_kernel<<<1, 1, 0, stream>>>(x, out);
}
void launch_overtaken(float* x, unsigned blocks, cudaStream_t stream) {
  overtaken_kernel<<<blocks, 64, 0, stream>>>(x);
}
void launch_flag(unsigned* flag, bool strong, cudaStream_t stream) {
  flag_kernel<<<3, 64, 0, stream>>>(flag, strong);
}

}  // namespace ziggurat::cuda_double
