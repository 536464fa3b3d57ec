// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernel_arrays.h: what tests of kernels have in common: arrays on the device,
// and a fixture that expects a fault.
#pragma once

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <random>
#include <string>
#include <vector>

#include "tests/cuda_double/cuda_test.h"

namespace ziggurat::cuda_double {

/// Device memory with the host's values in it.
template <class T>
class Array {
 public:
  explicit Array(std::size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T)), cudaSuccess);
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  ~Array() {
    cudaDeviceSynchronize();
    cudaFree(data_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* get() const { return static_cast<T*>(data_); }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    EXPECT_EQ(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return result;
  }

 private:
  std::size_t count_;
  void* data_ = nullptr;
};

class Kernels : public CudaTest {
 protected:
  void TearDown() override {
    if (lost_) {
      static_cast<void>(report());
    } else {
      CudaTest::TearDown();
    }
  }
  /// Waits for a kernel that must fail, and takes what was found.
  std::vector<std::string> fault(cudaError_t expected) {
    EXPECT_EQ(cudaDeviceSynchronize(), expected);
    lost_ = true;
    return take_findings();
  }
  bool lost_ = false;
};

inline std::vector<float> hard_values(unsigned count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = std::uniform_real_distribution<float>(-2, 2)(random);
  return values;
}

}  // namespace ziggurat::cuda_double
