// SPDX-License-Identifier: Apache-2.0
// tests/tiers/cuda_device_test.cc: what the CUDA device alone promises, over the double: host
// memory that it refuses, callers' streams, and memory whose transfer could not be waited for.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "tests/cuda_double/cuda_test.h"
#include "tiers/device/cuda_context.h"
#include "tiers/device/cuda_device.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

using cuda_double::Pace;
using testing::HasSubstr;
using Direction = Stream::Direction;

constexpr std::uint64_t kCapacity = 4 * kMiB;

class CudaDeviceTest : public cuda_double::CudaTest {
 protected:
  explicit CudaDeviceTest(const cuda_double::Options& options = {.devices = 2})
      : CudaTest(options),
        device_(CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kCapacity})) {}
  void TearDown() override {
    registration_.reset();
    reactor_.run_until_idle();
    device_.reset();
    CudaTest::TearDown();
  }
  void register_all() { registration_ = device_->register_host_memory(host_.bytes()); }
  std::span<std::byte> host(std::size_t offset, std::size_t size_bytes) const {
    return host_.bytes().subspan(offset, size_bytes);
  }
  Error error_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error";
    return Error(ErrorCode::kCancelled, "");
  }
  Error error_of_copy(const Stream::Copy& request) {
    const auto stream = device_->create_stream("refusing");
    return error_of([&] { reactor_.block_on(copy(reactor_, *stream, request)); });
  }
  /// The device does what it should.
  void expect_works() {
    const auto stream = device_->create_stream("after");
    const DeviceBuffer place = device_->allocate(64, Purpose::kStaging);
    std::ranges::fill(host(0, 64), std::byte{7});
    reactor_.block_on(
        copy(reactor_, *stream, {place.data(), host(0, 64).data(), 64, Direction::kToDevice}));
    reactor_.block_on(
        copy(reactor_, *stream, {host(64, 64).data(), place.data(), 64, Direction::kToHost}));
    EXPECT_EQ(host(64, 64)[63], std::byte{7});
  }

  Reactor reactor_;
  const HostMapping host_{{.owner = "test", .size_bytes = 4 * kMiB}};
  std::shared_ptr<HostRegistration> registration_;
  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaDeviceTest, copies_of_host_memory_that_is_not_registered_are_refused) {
  const DeviceBuffer place = device_->allocate(2 * kMiB, Purpose::kStaging);
  std::byte* const bytes = host(0, 1).data();
  const std::string address = fmt::format("{}", fmt::ptr(bytes));
  const Error to = error_of_copy({place.data(), bytes, 4096, Direction::kToDevice});
  EXPECT_EQ(to.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(to.what(), HasSubstr(address));
  EXPECT_THAT(to.what(), HasSubstr("not registered"));
  const Error from = error_of_copy({bytes, place.data(), 4096, Direction::kToHost});
  EXPECT_EQ(from.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(from.what(), HasSubstr(address));

  const auto low = device_->register_host_memory(host(0, kMiB));
  const auto high = device_->register_host_memory(host(kMiB, kMiB));
  const Stream::Copy across{place.data(), bytes + kMiB - 1, 2, Direction::kToDevice};
  EXPECT_EQ(error_of_copy(across).code(), ErrorCode::kInvalidArgument) << "it straddles two";
  const Stream::Copy past{place.data(), bytes + 2 * kMiB - 1, 2, Direction::kToDevice};
  EXPECT_EQ(error_of_copy(past).code(), ErrorCode::kInvalidArgument);
  expect_works();
}

TEST_F(CudaDeviceTest, memory_that_cannot_be_registered_is_no_loss_of_the_device) {
  register_all();
  const Error twice =
      error_of([&] { auto kept = device_->register_host_memory(host(kMiB, kMiB)); });
  EXPECT_EQ(twice.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(twice.native(), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_THAT(twice.what(), HasSubstr("1.0 MiB of host memory"));
  EXPECT_THAT(twice.what(), HasSubstr("cudaErrorHostMemoryAlreadyRegistered"));
  registration_.reset();
  cuda_double::fail_call(2, cudaErrorNotSupported);  // behind cudaGetDevice
  const Error unsupported = error_of([&] { register_all(); });
  EXPECT_EQ(unsupported.code(), ErrorCode::kUnimplemented) << unsupported.what();
  cuda_double::fail_call(2, cudaErrorMemoryAllocation);
  const Error too_much = error_of([&] { register_all(); });
  EXPECT_EQ(too_much.code(), ErrorCode::kResourceExhausted) << too_much.what();
  EXPECT_THAT(too_much.what(), HasSubstr("smaller host memory budget"));
  register_all();
  expect_works();
}

TEST_F(CudaDeviceTest, copy_streams_go_first) {
  int high = 0;
  int normal = 0;
  const auto first = device_->create_stream("first");
  const auto second = device_->create_stream("second", StreamPriority::kNormal);
  ASSERT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(first->native_handle()), &high),
            cudaSuccess);
  ASSERT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(second->native_handle()), &normal),
            cudaSuccess);
  EXPECT_LT(high, normal) << "the lower number is the higher priority";
}

TEST_F(CudaDeviceTest, the_threads_own_device_stays_current) {
  register_all();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  expect_works();
  const auto caller = device_->caller_stream(nullptr);
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 1);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

/// A stream of a trainer's, with work of its own.
class CudaCallerTest : public CudaDeviceTest {
 protected:
  CudaCallerTest() {
    register_all();
    EXPECT_EQ(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), cudaSuccess);
    caller_ = device_->caller_stream(handle_);
  }
  void TearDown() override {
    caller_.reset();
    place_ = DeviceBuffer();
    EXPECT_EQ(cudaStreamDestroy(handle_), cudaSuccess);
    CudaDeviceTest::TearDown();
  }
  void compute(int value) {
    EXPECT_EQ(cudaMemsetAsync(place_.data(), value, place_.size_bytes(), handle_), cudaSuccess);
  }

  cudaStream_t handle_ = nullptr;
  std::unique_ptr<StreamRef> caller_;
  DeviceBuffer place_ = device_->allocate(kMiB, Purpose::kGradients);
};

TEST_F(CudaCallerTest, the_engine_and_a_trainer_wait_for_each_other_on_the_gpu) {
  const auto stream = device_->create_stream("engine");
  for (int round = 1; round < 5; ++round) {
    std::thread trainer([&] {  // any thread
      compute(round);
      stream->wait(caller_->record());
    });
    trainer.join();
    stream->copy({host(0, kMiB).data(), place_.data(), kMiB, Direction::kToHost},
                 [&](std::exception_ptr error) { EXPECT_FALSE(error); });
    caller_->wait(stream->record());
    compute(0x55);
    reactor_.block_on(caller_->record().wait());
    EXPECT_EQ(host(0, kMiB)[0], static_cast<std::byte>(round));
    EXPECT_EQ(host(0, kMiB)[kMiB - 1], static_cast<std::byte>(round));
  }
}

TEST_F(CudaCallerTest, without_the_wait_the_double_would_say_so) {
  const auto stream = device_->create_stream("engine");
  compute(1);
  stream->copy({host(0, kMiB).data(), place_.data(), kMiB, Direction::kToHost},
               [&](std::exception_ptr) {});
  reactor_.block_on(stream->record().wait());
  EXPECT_EQ(cudaStreamSynchronize(handle_), cudaSuccess);
  EXPECT_THAT(cuda_double::take_findings(), testing::Not(testing::IsEmpty()));
}

TEST_F(CudaCallerTest, memory_of_a_released_unit_waits_for_the_trainers_kernels) {
  const auto stream = device_->create_stream("engine");
  compute(3);
  place_.used_until(caller_->record());
  std::byte* const address = place_.data();
  place_ = DeviceBuffer();
  place_ = device_->allocate(kMiB, Purpose::kParams);
  ASSERT_EQ(place_.data(), address);
  std::ranges::fill(host(0, kMiB), std::byte{9});
  stream->copy({address, host(0, kMiB).data(), kMiB, Direction::kToDevice},
               [&](std::exception_ptr error) { EXPECT_FALSE(error); });
  stream->copy({host(kMiB, kMiB).data(), address, kMiB, Direction::kToHost},
               [&](std::exception_ptr error) { EXPECT_FALSE(error); });
  reactor_.block_on(stream->record().wait());
  EXPECT_EQ(host(kMiB, kMiB)[7], std::byte{9});
}

TEST_F(CudaDeviceTest, memory_may_be_lent) {
  void* lent = nullptr;
  ASSERT_EQ(cudaMalloc(&lent, kMiB), cudaSuccess);
  auto other =
      CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kMiB, .lent_memory = lent});
  EXPECT_THAT(other->description(), HasSubstr("1.0 MiB lent by the caller"));
  DeviceBuffer place = other->allocate(kMiB, Purpose::kParams);
  EXPECT_EQ(place.data(), lent);
  auto stream = other->create_stream("lent");
  ASSERT_EQ(cudaMemsetAsync(lent, 5, kMiB, static_cast<cudaStream_t>(stream->native_handle())),
            cudaSuccess);
  place.used_until(stream->record());
  place = DeviceBuffer();
  stream.reset();
  other.reset();
  ASSERT_EQ(cudaFree(lent), cudaSuccess);  // it is still the lender's
}

TEST_F(CudaDeviceTest, lent_memory_is_aligned_and_of_this_gpu) {
  void* lent = nullptr;
  ASSERT_EQ(cudaMalloc(&lent, kMiB), cudaSuccess);
  const auto refusal = [&](int index, void* memory, std::uint64_t size_bytes) {
    const Error error = error_of([&] {
      CudaDevice::create(reactor_,
                         {.index = index, .capacity_bytes = size_bytes, .lent_memory = memory});
    });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  auto* const bytes = static_cast<std::byte*>(lent);
  EXPECT_THAT(refusal(0, bytes + 64, kMiB / 2), HasSubstr("whose address 256 divides"));
  EXPECT_THAT(refusal(1, lent, kMiB), HasSubstr("lend memory that was allocated on this GPU"));
  EXPECT_THAT(refusal(0, host(0, kMiB).data(), kMiB), HasSubstr("are not all in its memory"));
  EXPECT_THAT(refusal(0, bytes, 2 * kMiB), HasSubstr("cuda0"));  // it ends before
  ASSERT_EQ(cudaFree(lent), cudaSuccess);
}

// As with memory of its own: the lender may use it again when the device is gone.
TEST_F(CudaCallerTest, a_device_of_lent_memory_ends_after_what_callers_use) {
  void* lent = nullptr;
  ASSERT_EQ(cudaMalloc(&lent, kMiB), cudaSuccess);
  auto other =
      CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kMiB, .lent_memory = lent});
  DeviceBuffer place = other->allocate(kMiB, Purpose::kParams);
  ASSERT_EQ(cudaMemsetAsync(lent, 5, kMiB, handle_), cudaSuccess);
  place.used_until(caller_->record());
  place = DeviceBuffer();
  other.reset();
  ASSERT_EQ(cudaFree(lent), cudaSuccess);
}

TEST_F(CudaCallerTest, a_stream_that_captures_is_refused) {
  const auto stream = device_->create_stream("engine");
  const Event event = stream->record();
  cuda_double::set_capturing(handle_, true);
  const Error recording = error_of([&] { static_cast<void>(caller_->record()); });
  EXPECT_EQ(recording.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(recording.what(), HasSubstr("capturing a CUDA graph"));
  EXPECT_EQ(error_of([&] { caller_->wait(event); }).code(), ErrorCode::kInvalidArgument);
  cuda_double::set_capturing(handle_, false);
  caller_->wait(event);
  reactor_.block_on(caller_->record().wait());
  expect_works();
}

TEST_F(CudaCallerTest, default_streams_are_streams_like_others) {
  const auto stream = device_->create_stream("engine");
  for (const cudaStream_t handle : {cudaStream_t{nullptr}, cudaStreamLegacy, cudaStreamPerThread}) {
    const auto caller = device_->caller_stream(handle);
    ASSERT_EQ(cudaMemsetAsync(place_.data(), 6, kMiB, handle), cudaSuccess);
    stream->wait(caller->record());
    stream->copy({host(0, kMiB).data(), place_.data(), kMiB, Direction::kToHost},
                 [&](std::exception_ptr error) { EXPECT_FALSE(error); });
    caller->wait(stream->record());
    ASSERT_EQ(cudaMemsetAsync(place_.data(), 7, kMiB, handle), cudaSuccess);
    reactor_.block_on(caller->record().wait());
    EXPECT_EQ(host(0, kMiB)[kMiB - 1], std::byte{6});
  }
}

TEST_F(CudaCallerTest, the_legacy_stream_is_refused_while_a_blocking_stream_captures) {
  const auto legacy = device_->caller_stream(nullptr);
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  cuda_double::set_capturing(blocking, true);
  const Error error = error_of([&] { static_cast<void>(legacy->record()); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("before or after"));
  cuda_double::set_capturing(blocking, false);
  reactor_.block_on(legacy->record().wait());
  ASSERT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(CudaDeviceTest, an_event_that_cannot_be_recorded_does_not_end_a_transfer) {
  register_all();
  const auto stream = device_->create_stream("test");
  const DeviceBuffer place = device_->allocate(kMiB, Purpose::kStaging);
  std::ranges::fill(host(0, kMiB), std::byte{5});
  std::ranges::fill(host(kMiB, kMiB), std::byte{0});
  reactor_.block_on(
      copy(reactor_, *stream, {place.data(), host(0, kMiB).data(), kMiB, Direction::kToDevice}));
  // cudaGetDevice, cudaMemcpyAsync, cudaGetDevice, cudaEventRecord
  cuda_double::fail_call(4, cudaErrorInvalidResourceHandle);
  bool done = false;
  stream->copy({host(kMiB, kMiB).data(), place.data(), kMiB, Direction::kToHost},
               [&](std::exception_ptr error) {
                 done = true;
                 EXPECT_TRUE(error);
                 // It was queued: the memory is ours again only now that it has ended.
                 EXPECT_EQ(host(kMiB, kMiB)[kMiB - 1], std::byte{5});
               });
  const Event event = stream->record();
  EXPECT_THROW(reactor_.block_on(event.wait()), Error);
  EXPECT_TRUE(done);
  EXPECT_FALSE(registration_->quarantined(host(kMiB, kMiB)));
  expect_works();
}

TEST(CudaContexts, are_made_on_the_devices_own_gpu_alone) {
  cuda_double::reset(1, {.devices = 2});
  {
    Reactor reactor;
    const HostMapping memory({.owner = "test", .size_bytes = kMiB});
    const auto device = CudaDevice::create(reactor, {.index = 1, .capacity_bytes = kMiB});
    const DeviceBuffer place = device->allocate(kMiB, Purpose::kParams);
    reactor.start();
    const auto body = [&]() -> Task<> {
      const auto registration = device->register_host_memory(memory.bytes());
      const auto stream = device->create_stream("test");
      const Stream::Copy request{place.data(), memory.bytes().data(), kMiB, Direction::kToDevice};
      co_await copy(reactor, *stream, request);
    };
    reactor.block_on(body());
    reactor.stop();
  }
  EXPECT_EQ(cuda_double::contexts(), 1) << "GPU 0 belongs to others";
  EXPECT_THAT(cuda_double::report(), testing::IsEmpty());
}

/// Nothing ends before the test says so.
class CudaByHand : public testing::Test {
 protected:
  CudaByHand() {
    cuda_double::reset(1, {.pace = Pace::kByHand});
    while_time_goes(
        [&] { device_ = CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kCapacity}); });
    registration_ = device_->register_host_memory(host_.bytes());
    stream_ = device_->create_stream("test");
    place_ = device_->allocate(kMiB, Purpose::kStaging);
  }
  void TearDown() override {
    stream_.reset();
    place_ = DeviceBuffer();
    registration_.reset();
    reactor_.run_until_idle();
    while_time_goes([&] { device_.reset(); });
  }
  static void while_time_goes(const std::function<void()>& action) {
    std::atomic<bool> done = false;
    std::thread clock([&done] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // `action` has begun
      while (!done) {
        if (const auto next = cuda_double::next_completion()) cuda_double::advance_to(*next);
      }
    });
    action();
    done = true;
    clock.join();
  }
  static void end_all() { cuda_double::advance_to(cuda_double::now() + std::chrono::seconds(1)); }

  Reactor reactor_;
  const HostMapping host_{{.owner = "test", .size_bytes = kMiB}};
  std::shared_ptr<HostRegistration> registration_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Stream> stream_;
  DeviceBuffer place_;
};

TEST_F(CudaByHand, completions_of_copies_that_ended_together_come_in_their_order) {
  std::vector<int> done;
  for (int i = 0; i < 8; ++i) {
    stream_->copy({place_.data(), host_.bytes().data(), kMiB, Direction::kToDevice},
                  [&done, i](std::exception_ptr error) {
                    EXPECT_FALSE(error);
                    done.push_back(i);
                  });
  }
  EXPECT_EQ(reactor_.context().poll(), 0u) << "nothing has ended";
  end_all();
  stream_.reset();  // its thread has posted all
  EXPECT_EQ(reactor_.context().poll(), 8u);
  EXPECT_THAT(done, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST_F(CudaByHand, a_wait_that_ends_after_the_device_was_given_up_proves_nothing) {
  std::exception_ptr error;
  stream_->copy({host_.bytes().data(), place_.data(), kMiB, Direction::kToHost},
                [&](std::exception_ptr its) { error = std::move(its); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // its waiter waits by now
  device_->context().give_up("the test says so");
  end_all();
  stream_.reset();
  reactor_.run_until_idle();
  EXPECT_TRUE(error);
  EXPECT_TRUE(registration_->quarantined(host_.bytes()));
  registration_.reset();
  EXPECT_THAT(cuda_double::report(), testing::Contains(HasSubstr("still registered")));
}

TEST_F(CudaByHand, the_block_is_not_freed_while_another_device_works_on_it) {
  std::unique_ptr<CudaDevice> other;
  while_time_goes(
      [&] { other = CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kCapacity}); });
  auto stream = other->create_stream("other");
  ASSERT_EQ(
      cudaMemsetAsync(place_.data(), 1, kMiB, static_cast<cudaStream_t>(stream->native_handle())),
      cudaSuccess);
  place_.used_until(stream->record());
  place_ = DeviceBuffer();
  stream_.reset();
  registration_.reset();
  while_time_goes([&] { device_.reset(); });
  EXPECT_THAT(cuda_double::take_findings(), testing::IsEmpty());
  stream.reset();
  while_time_goes([&] { other.reset(); });
}

TEST(CudaInventory, lists_what_there_is_without_a_management_library) {
  cuda_double::reset(1, {.devices = 2, .memory_bytes = 64 * kMiB});
  const CudaInventory inventory = cuda_devices();
  ASSERT_EQ(inventory.gpus.size(), 2u);
  EXPECT_EQ(inventory.gpus[1].index, 1);
  EXPECT_EQ(inventory.gpus[1].memory_bytes, 64 * kMiB);
  EXPECT_FALSE(inventory.gpus[0].free_bytes) << "no driver is here to be asked";
  EXPECT_EQ(inventory.why_none, "");
  EXPECT_EQ(cuda_double::contexts(), 0) << "a context takes hundreds of MiB of a GPU";
  cuda_double::reset(1, {.devices = 0});
  EXPECT_NE(cuda_devices().why_none, "");
}

TEST(CudaInventory, names_a_driver_that_is_too_old_and_the_one_that_is_needed) {
  cuda_double::reset(1, {.driver_version = 11080});
  EXPECT_THAT(cuda_devices().why_none, HasSubstr("the driver is for CUDA 11.8, and CUDA "));
  EXPECT_THAT(cuda_devices().why_none, HasSubstr(" needs driver "));
  EXPECT_EQ(cuda_devices().driver_version, "11.8");
  Reactor reactor;
  try {
    static_cast<void>(CudaDevice::create(reactor, {.capacity_bytes = kMiB}));
    ADD_FAILURE() << "it was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), "no CUDA device can be used: " + cuda_devices().why_none);
  }
  cuda_double::reset(1);
}

TEST(CudaDeviceCreate, names_what_is_wrong) {
  Reactor reactor;
  const auto error_of = [&](const CudaDeviceOptions& options) {
    try {
      CudaDevice::create(reactor, options);
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorCode::kCancelled, "");
  };
  cuda_double::reset(1, {.devices = 1, .memory_bytes = 64 * kMiB});
  const Error index = error_of({.index = 1, .capacity_bytes = kMiB});
  EXPECT_EQ(index.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(index.what(), HasSubstr("this process sees 1"));
  EXPECT_EQ(error_of({.index = 0, .capacity_bytes = 255}).code(), ErrorCode::kInvalidArgument);
  const Error memory = error_of({.index = 0, .capacity_bytes = 128 * kMiB});
  EXPECT_EQ(memory.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(memory.what(), HasSubstr("budget of 128.0 MiB does not fit: 64.0 MiB of 64.0 MiB"));
  EXPECT_THAT(cuda_double::report(), testing::IsEmpty());
}

}  // namespace
}  // namespace ziggurat
