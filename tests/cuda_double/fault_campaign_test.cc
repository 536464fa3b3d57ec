// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/fault_campaign_test.cc: an error at every call and every completion in turn,
// over a program that does a little of everything and checks every result.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <cstring>

#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/kernels/launch.h"

namespace ziggurat::cuda_double {
namespace {

constexpr unsigned kCount = 64;

/// Stops at the first error; gives back what it got as far as the device lets it.
class Program {
 public:
  cudaError_t run() {
    const cudaError_t error = work();
    give_back();
    return error;
  }

 private:
  bool ok(cudaError_t error) {
    error_ = error;
    return error == cudaSuccess;
  }
  cudaError_t work() {
    const std::size_t size = 3 * kCount * sizeof(float);
    if (!ok(cudaSetDevice(0))) return error_;
    for (cudaStream_t& stream : streams_) {
      if (!ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))) return error_;
    }
    if (!ok(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming))) return error_;
    if (!ok(cudaMallocHost(&host_, size))) return error_;
    std::memset(host_, 0, size);
    if (!ok(cudaMallocAsync(&in_, size, streams_[0]))) return error_;
    if (!ok(cudaMalloc(&out_, size))) return error_;
    if (!ok(cudaMemcpyAsync(in_, host_, size, cudaMemcpyHostToDevice, streams_[0]))) return error_;
    if (!ok(cudaEventRecord(event_, streams_[0]))) return error_;
    if (!ok(cudaStreamWaitEvent(streams_[1], event_, 0))) return error_;
    launch_product_sum(static_cast<float*>(in_), static_cast<float*>(out_), kCount, streams_[1]);
    if (!ok(cudaGetLastError())) return error_;
    if (!ok(cudaMemcpyAsync(host_, out_, kCount * sizeof(float), cudaMemcpyDeviceToHost,
                            streams_[1]))) {
      return error_;
    }
    if (!ok(cudaStreamSynchronize(streams_[1]))) return error_;
    return cudaSuccess;
  }
  void give_back() {
    cudaDeviceSynchronize();
    if (in_ != nullptr) cudaFree(in_);
    if (out_ != nullptr) cudaFree(out_);
    if (host_ != nullptr) cudaFreeHost(host_);
    if (event_ != nullptr) cudaEventDestroy(event_);
    for (cudaStream_t stream : streams_) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  cudaError_t error_ = cudaSuccess;
  cudaStream_t streams_[2] = {};
  cudaEvent_t event_ = nullptr;
  void* host_ = nullptr;
  void* in_ = nullptr;
  void* out_ = nullptr;
};

TEST(FaultCampaign, every_call_fails_once) {
  reset(1);
  ASSERT_EQ(Program().run(), cudaSuccess);
  const std::uint64_t all = calls();
  ASSERT_GT(all, 15u);
  ASSERT_THAT(report(), testing::IsEmpty());
  int seen = 0;
  for (std::uint64_t n = 1; n <= all; ++n) {
    reset(n);
    fail_call(n, cudaErrorMemoryAllocation);
    const cudaError_t error = Program().run();
    seen += error == cudaErrorMemoryAllocation ? 1 : 0;
    // One that fails to give something back leaks that, and nothing else.
    EXPECT_LE(report().size(), error == cudaSuccess ? 1u : 0u) << "call " << n;
  }
  EXPECT_EQ(seen, 13) << "the calls before anything is given back";
}

TEST(FaultCampaign, every_completion_loses_the_device_once) {
  reset(1);
  ASSERT_EQ(Program().run(), cudaSuccess);
  const std::uint64_t all = completions();
  ASSERT_GE(all, 6u);
  ASSERT_THAT(report(), testing::IsEmpty());
  for (std::uint64_t n = 1; n <= all; ++n) {
    reset(n);
    fail_completion(n, cudaErrorECCUncorrectable);
    EXPECT_EQ(Program().run(), cudaErrorECCUncorrectable) << "completion " << n;
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorECCUncorrectable) << "it stays";
    static_cast<void>(report());
  }
  reset(1);
}

TEST(FaultCampaign, every_seed_has_its_trace) {
  const auto trace_of = [](std::uint64_t seed) {
    reset(seed);
    EXPECT_EQ(Program().run(), cudaSuccess);
    EXPECT_THAT(report(), testing::IsEmpty());
    return trace_hash();
  };
  for (std::uint64_t seed = 1; seed < 20; ++seed) {
    EXPECT_EQ(trace_of(seed), trace_of(seed));
    EXPECT_NE(trace_of(seed), trace_of(seed + 1));
  }
}

}  // namespace
}  // namespace ziggurat::cuda_double
