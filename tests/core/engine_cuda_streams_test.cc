// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_cuda_streams_test.cc: an engine's calls with a stream that they cannot use,
// over the double of the CUDA runtime: nothing changes, and the next call works. That streams are
// honoured is shown by a trainer (tests/integrations/device_mlp_test.cc).
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <functional>
#include <string>

#include "tests/core/engine_harness.h"
#include "tests/cuda_double/cuda_double.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat::testing {
namespace engine_cuda_streams_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class EngineCudaStreams : public ::testing::Test {
 protected:
  EngineCudaStreams() {
    cuda_double::reset(11);
    runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
    device_ = CudaDevice::create(runtime_->reactor, {.capacity_bytes = 4 * kMiB});
    EngineConfig config = small_config(directory_.path());
    config.placement = parse_placement("all=host");
    engine_ = Engine::open(model_, config, *runtime_, *device_, initialize);
    EXPECT_EQ(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), cudaSuccess);
    stream_ = device_->caller_stream(handle_);
  }
  std::vector<std::string> close() {
    stream_.reset();
    cudaStreamDestroy(handle_);
    engine_.reset();
    device_.reset();
    runtime_.reset();
    return cuda_double::report();
  }
  static void expect_refused(const std::function<void()>& call, ErrorCode code,
                             const std::string& why) {
    try {
      call();
      ADD_FAILURE() << "nothing was refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("cuda0"), HasSubstr(why)));
    }
  }
  /// While the stream captures; then the call is made well.
  void expect_not_captured(const std::function<void()>& call) {
    cuda_double::set_capturing(handle_, true);
    expect_refused(call, ErrorCode::kInvalidArgument, "before or after the capture");
    cuda_double::set_capturing(handle_, false);
    call();
  }

  const ModelSpec model_ = small_model();
  const ScratchDirectory directory_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Engine> engine_;
  cudaStream_t handle_ = nullptr;
  std::unique_ptr<StreamRef> stream_;
};

TEST_F(EngineCudaStreams, OneThatCapturesIsRefusedByEveryCallAndNothingChanges) {
  for (UnitId u = 5; u-- > 0;) {
    expect_not_captured([&] { engine_->acquire(u, *stream_); });
    expect_not_captured([&] { engine_->gradient(u, *stream_); });
    expect_not_captured([&] { engine_->release(u, *stream_); });
    expect_not_captured([&] { engine_->finish_gradient(u, *stream_); });
  }
  const StepResult result = engine_->step({.learning_rate = 0.01F, .blob = {}});
  EXPECT_EQ(result.generation, 1U);
  EXPECT_EQ(result.grad_norm, 0.0);
  EXPECT_THAT(close(), IsEmpty());
}

TEST_F(EngineCudaStreams, CallsOnALostDeviceThrowItsError) {
  engine_->acquire(0, *stream_);
  engine_->gradient(0, *stream_);
  cuda_double::lose_device(cudaErrorECCUncorrectable);
  const std::vector<std::function<void()>> calls{
      [&] { engine_->release(0, *stream_); }, [&] { engine_->finish_gradient(0, *stream_); },
      [&] { engine_->acquire(1, *stream_); }, [&] { engine_->gradient(1, *stream_); }};
  for (const std::function<void()>& call : calls)
    expect_refused(call, ErrorCode::kUnavailable, "cudaErrorECCUncorrectable");
  static_cast<void>(close());  // a lost device frees nothing
}

}  // namespace engine_cuda_streams_test
}  // namespace ziggurat::testing
