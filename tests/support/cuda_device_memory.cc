// SPDX-License-Identifier: Apache-2.0
// tests/support/cuda_device_memory.cc: cuda_memory.h over the double of the CUDA runtime: device
// memory that the CPU cannot touch, kernels run from their PTX. Each test begins with a fresh
// machine, and fails by what was done against the documentation or left behind.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include "tests/cuda_double/cuda_double.h"
#include "tests/support/cuda_memory.h"

namespace ziggurat::testing {
namespace {

constexpr std::uint64_t kSeed = 20261123;

class FreshMachine : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { cuda_double::reset(kSeed); }
  void OnTestEnd(const ::testing::TestInfo&) override {
    EXPECT_THAT(cuda_double::report(), ::testing::IsEmpty());
  }
};

/// Before the tests begin; the list of listeners owns it.
const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new FreshMachine);
  return true;
}();

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
