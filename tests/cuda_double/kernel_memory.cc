// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernel_memory.cc: tests/support/cuda_memory.h over the double: device memory
// that the CPU cannot touch, and kernels that run from their PTX. Beside fresh_machine.cc.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include "tests/support/cuda_memory.h"

namespace ziggurat::testing {
namespace {

void require(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

}  // namespace

std::byte* allocate_on_device(std::size_t size_bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, size_bytes));
  return static_cast<std::byte*>(memory);
}
void free_on_device(std::byte* memory) { require(cudaFree(memory)); }
void copy_to_device(std::byte* to, std::span<const std::byte> from) {
  require(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice));
}
/// On the stream of the kernels, behind them.
void copy_from_device(std::span<std::byte> to, const std::byte* from) {
  require(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost));
}
/// The machine's own seed draws the order of its blocks and threads.
void draw_order(std::uint64_t) {}

}  // namespace ziggurat::testing
