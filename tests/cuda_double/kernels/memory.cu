// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels/memory.cu: see memory.h.
#include "tests/cuda_double/kernels/memory.h"

namespace ziggurat::cuda_double {
namespace {

__constant__ float factors[4] = {2, 3, 5, 7};

__global__ void permuted_kernel(Table table, std::int32_t* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = permuted(table, i);
}

__global__ void widened_kernel(const std::int8_t* a, const std::int16_t* b, const std::uint8_t* c,
                               std::int32_t* out, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = widened(a[i], b[i], c[i]);
}

__global__ void vectors_kernel(const float4* x, float4* out) {
  __shared__ float4 part[32];
  float4 value = x[blockIdx.x * 32 + threadIdx.x];
  value.x *= factors[threadIdx.x % 4];
  part[threadIdx.x] = value;
  __syncwarp();
  out[blockIdx.x * 32 + threadIdx.x] = part[31 - threadIdx.x];
}

__global__ void indices_kernel(std::uint32_t* out) {
  extern __shared__ std::uint32_t own[];
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  own[threads - 1 - thread] = block * threads + threads - 1 - thread;
  __syncthreads();
  out[block * threads + thread] = own[thread];
}

__global__ void atomics_kernel(Counters* counters) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&counters->float_sum, 0.5f);
  atomicAdd(&counters->double_sum, 0.25);
  atomicMax(&counters->largest, static_cast<std::int32_t>(i) - 5);
  atomicMin(&counters->smallest, i + 3);
  atomicOr(&counters->bits, 1u << i % 32);
  atomicInc(&counters->wrapped, 9);
  atomicAdd(reinterpret_cast<unsigned long long*>(&counters->sum64), 1ull << 33);
  std::uint32_t old = 0;
  for (;;) {
    const std::uint32_t seen = atomicCAS(&counters->swapped_sum, old, old + i);
    if (seen == old) break;
    old = seen;
  }
}

}  // namespace

void launch_permuted(const Table& table, std::int32_t* out, unsigned count, cudaStream_t stream) {
  permuted_kernel<<<(count + 63) / 64, 64, 0, stream>>>(table, out, count);
}
void launch_widened(const std::int8_t* a, const std::int16_t* b, const std::uint8_t* c,
                    std::int32_t* out, unsigned count, cudaStream_t stream) {
  widened_kernel<<<(count + 63) / 64, 64, 0, stream>>>(a, b, c, out, count);
}
void launch_vectors(const float* x, float* out, unsigned blocks, cudaStream_t stream) {
  vectors_kernel<<<blocks, 32, 0, stream>>>(reinterpret_cast<const float4*>(x),
                                            reinterpret_cast<float4*>(out));
}
void launch_indices(std::uint32_t* out, dim3 grid, dim3 block, std::size_t shared_bytes,
                    cudaStream_t stream) {
  indices_kernel<<<grid, block, shared_bytes, stream>>>(out);
}
void launch_atomics(Counters* counters, unsigned threads, cudaStream_t stream) {
  atomics_kernel<<<threads / 50, 50, 0, stream>>>(counters);
}

}  // namespace ziggurat::cuda_double
