// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/runtime_test.cc: the double keeps the documented rules, and sees each breach.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "tests/cuda_double/cuda_test.h"

namespace ziggurat::cuda_double {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::size_t kSize = 4096;

/// Two streams, device memory and pinned memory, given back at the end.
class Runtime : public CudaTest {
 protected:
  explicit Runtime(const Options& options = {}) : CudaTest(options) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&one_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&two_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&device_, kSize), cudaSuccess);
    EXPECT_EQ(cudaMallocHost(&host_, kSize), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
  }
  void TearDown() override {
    if (!lost_) {
      EXPECT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(two_), cudaSuccess);
      cudaFree(device_);
      cudaFreeHost(host_);
      cudaEventDestroy(event_);
      cudaStreamDestroy(one_);
      cudaStreamDestroy(two_);
      CudaTest::TearDown();
    } else {
      static_cast<void>(report());  // a lost device gives nothing back
    }
  }
  std::byte* host() { return static_cast<std::byte*>(host_); }
  std::byte* device() { return static_cast<std::byte*>(device_); }
  cudaError_t to_device(cudaStream_t stream, std::size_t size = kSize) {
    return cudaMemcpyAsync(device_, host_, size, cudaMemcpyHostToDevice, stream);
  }
  cudaError_t to_host(cudaStream_t stream, std::size_t size = kSize) {
    return cudaMemcpyAsync(host_, device_, size, cudaMemcpyDeviceToHost, stream);
  }

  cudaStream_t one_ = nullptr;
  cudaStream_t two_ = nullptr;
  cudaEvent_t event_ = nullptr;
  void* device_ = nullptr;
  void* host_ = nullptr;
  bool lost_ = false;
};

TEST_F(Runtime, a_copy_arrives_when_it_was_waited_for_and_not_before) {
  std::memset(host_, 7, kSize);
  ASSERT_EQ(to_device(one_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  std::memset(host_, 0, kSize);
  ASSERT_EQ(to_host(one_), cudaSuccess);
  EXPECT_NE(host()[0], std::byte{7}) << "poisoned";
  EXPECT_NE(host()[0], host()[1]);
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_EQ(host()[0], std::byte{7});
  EXPECT_EQ(host()[kSize - 1], std::byte{7});
}

TEST_F(Runtime, a_query_says_not_ready_first_and_is_an_error_that_stays_until_read) {
  ASSERT_EQ(to_host(one_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, one_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  int asked = 0;
  while (cudaEventQuery(event_) == cudaErrorNotReady) ASSERT_LT(++asked, 100);
  static_cast<void>(cudaGetLastError());
}

TEST_F(Runtime, an_event_that_was_never_recorded_is_complete_and_nobody_may_wait_for_it) {
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(one_, event_, 0), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("never recorded")));
}

TEST_F(Runtime, streams_that_nothing_orders_race) {
  ASSERT_EQ(to_device(one_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device_, 1, kSize, two_), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("nothing orders it after")));
}

TEST_F(Runtime, an_event_orders_streams_and_so_does_the_host) {
  ASSERT_EQ(to_device(one_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, one_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(two_, event_, 0), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device_, 1, kSize, two_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(two_), cudaSuccess);
  ASSERT_EQ(to_host(one_), cudaSuccess);
}

TEST_F(Runtime, a_wait_takes_the_record_before_it_not_a_later_one) {
  ASSERT_EQ(cudaEventRecord(event_, one_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(two_, event_, 0), cudaSuccess);
  ASSERT_EQ(to_device(one_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, one_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device_, 1, kSize, two_), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("nothing orders it after")));
}

TEST_F(Runtime, the_host_must_leave_what_is_under_way) {
  std::memset(host_, 1, kSize);
  ASSERT_EQ(to_device(one_), cudaSuccess);
  host()[17] = std::byte{9};
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("its source changed")));
  ASSERT_EQ(to_host(one_), cudaSuccess);
  host()[17] = ~host()[17];
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("wrote into its destination")));
  ASSERT_EQ(to_host(one_), cudaSuccess);
  host_reads(host_, 1);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("is under way")));
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("nothing orders it after the host")));
}

TEST_F(Runtime, an_access_after_the_copy_ran_but_before_anybody_waited_is_a_race) {
  ASSERT_EQ(to_host(one_), cudaSuccess);
  ASSERT_EQ(to_host(one_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, two_), cudaSuccess);
  while (next_completion()) advance_to(*next_completion());
  host_reads(host_, 1);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("the host reads")));
}

TEST_F(Runtime, what_is_under_way_must_not_be_given_back) {
  void* more = nullptr;
  ASSERT_EQ(cudaMalloc(&more, kSize), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(more, 1, kSize, one_), cudaSuccess);
  ASSERT_EQ(cudaFree(more), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("cudaFree: cudaMemsetAsync")));
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);

  std::vector<std::byte> memory(kSize);
  ASSERT_EQ(cudaHostRegister(memory.data(), kSize, 0), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(device_, memory.data(), kSize, cudaMemcpyDefault, one_), cudaSuccess);
  ASSERT_EQ(cudaHostUnregister(memory.data()), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("cudaHostUnregister: cudaMemcpyAsync")));
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);

  cudaStream_t brief = nullptr;
  ASSERT_EQ(cudaStreamCreate(&brief), cudaSuccess);
  ASSERT_EQ(to_device(brief), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(brief), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("cudaStreamDestroy: cudaMemcpyAsync")));
  EXPECT_EQ(cudaStreamSynchronize(brief), cudaErrorInvalidResourceHandle);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("was destroyed")));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(Runtime, memory_of_a_stream_needs_its_order) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocAsync(&memory, kSize, one_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kSize, two_), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("cudaMallocAsync")));
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kSize, two_), cudaSuccess);
  ASSERT_EQ(cudaFreeAsync(memory, one_), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(memory, 1, kSize, one_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeAsync(memory, one_), cudaErrorInvalidValue);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(take_findings(), testing::Contains(HasSubstr("was given to cudaFreeAsync")));
}

TEST_F(Runtime, a_pool_keeps_what_its_threshold_allows) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = 0;
  cudaMemPool_t pool = nullptr;
  ASSERT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
  std::uint64_t threshold = 3 * kSize;
  ASSERT_EQ(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
            cudaSuccess);
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocFromPoolAsync(&memory, 5 * kSize, pool, one_), cudaSuccess);
  ASSERT_EQ(cudaFreeAsync(memory, one_), cudaSuccess);
  const auto reserved = [&] {
    std::uint64_t value = 0;
    EXPECT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &value),
              cudaSuccess);
    return value;
  };
  EXPECT_EQ(reserved(), 5 * kSize);
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_EQ(reserved(), 3 * kSize) << "released at a synchronization";
  ASSERT_EQ(cudaMemPoolTrimTo(pool, 0), cudaSuccess);
  EXPECT_EQ(reserved(), 0u);
  ASSERT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
}

TEST_F(Runtime, memory_ends) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, Options().memory_bytes), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMallocAsync(&memory, Options().memory_bytes, one_), cudaErrorMemoryAllocation);
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, total - kSize);
  ASSERT_EQ(cudaMalloc(&memory, free), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(Runtime, copies_outside_allocations_and_across_registrations_are_refused) {
  EXPECT_EQ(cudaMemcpyAsync(device() + 1, host_, kSize, cudaMemcpyHostToDevice, one_),
            cudaErrorInvalidValue);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("1 bytes into the allocation of 4096")));
  EXPECT_EQ(cudaMemcpyAsync(device_, host_, kSize, cudaMemcpyDeviceToHost, one_),
            cudaErrorInvalidMemcpyDirection);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("direction")));
  std::vector<std::byte> memory(kSize);
  ASSERT_EQ(cudaHostRegister(memory.data(), kSize / 2, 0), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(memory.data() + 1, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaMemcpyAsync(device_, memory.data(), kSize, cudaMemcpyHostToDevice, one_),
            cudaErrorInvalidValue);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("straddle")));
  EXPECT_EQ(cudaHostUnregister(memory.data() + 8), cudaErrorHostMemoryNotRegistered);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("does not begin a registration")));
  ASSERT_EQ(cudaHostUnregister(memory.data()), cudaSuccess);
}

TEST_F(Runtime, pageable_copies_are_staged_or_wait) {
  for (int i = 0; i < 8; ++i) {
    std::vector<std::byte> memory(kSize, std::byte(i));
    ASSERT_EQ(cudaMemcpyAsync(device_, memory.data(), kSize, cudaMemcpyHostToDevice, one_),
              cudaSuccess);
    memory.assign(kSize, std::byte{99});
    ASSERT_EQ(cudaMemcpyAsync(memory.data(), device_, kSize, cudaMemcpyDeviceToHost, one_),
              cudaSuccess);
    EXPECT_EQ(memory[kSize - 1], std::byte(i)) << "returns when it is over";
  }
}

TEST_F(Runtime, the_null_stream_and_blocking_streams_wait_for_each_other) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device_, 1, kSize, blocking), cudaSuccess);
  ASSERT_EQ(cudaMemset(device_, 2, kSize), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device_, 3, kSize, blocking), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
  EXPECT_EQ(*device_bytes(device_, 1), std::byte{3});
  ASSERT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(Runtime, host_functions_come_in_order_and_must_not_call_cuda) {
  std::memset(host_, 5, kSize);
  ASSERT_EQ(to_device(one_), cudaSuccess);
  std::promise<cudaError_t> answer;
  ASSERT_EQ(
      cudaLaunchHostFunc(
          one_,
          [](void* user_data) {
            int device = 0;
            static_cast<std::promise<cudaError_t>*>(user_data)->set_value(cudaGetDevice(&device));
          },
          &answer),
      cudaSuccess);
  EXPECT_EQ(answer.get_future().get(), cudaErrorNotPermitted) << "nobody else waits";
  EXPECT_EQ(*device_bytes(device_, 1), std::byte{5});
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("in a host function")));
}

TEST_F(Runtime, a_held_host_function_holds_its_stream_only) {
  std::promise<void> release;
  std::future<void> held = release.get_future();
  ASSERT_EQ(
      cudaLaunchHostFunc(
          one_, [](void* user_data) { static_cast<std::future<void>*>(user_data)->wait(); }, &held),
      cudaSuccess);
  ASSERT_EQ(to_device(one_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, one_), cudaSuccess);
  void* other = nullptr;
  ASSERT_EQ(cudaMallocAsync(&other, kSize, two_), cudaSuccess);
  ASSERT_EQ(cudaFreeAsync(other, two_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(two_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  static_cast<void>(cudaGetLastError());
  release.set_value();
  ASSERT_EQ(cudaEventSynchronize(event_), cudaSuccess);
}

TEST_F(Runtime, an_injected_error_does_nothing_else) {
  fail_call(2, cudaErrorMemoryAllocation);
  void* memory = nullptr;
  int device = 0;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
}

class RuntimeByHand : public Runtime {
 protected:
  RuntimeByHand() : Runtime({.pace = Pace::kByHand}) {}
};

TEST_F(RuntimeByHand, a_sticky_error_stays_and_callbacks_get_it_but_host_functions_never_run) {
  lost_ = true;
  fail_completion(1, cudaErrorECCUncorrectable);
  ASSERT_EQ(to_host(one_), cudaSuccess);
  std::atomic<int> host_functions = 0;
  std::promise<cudaError_t> status;
  ASSERT_EQ(
      cudaLaunchHostFunc(
          one_, [](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &host_functions),
      cudaSuccess);
  ASSERT_EQ(cudaStreamAddCallback(
                one_,
                [](cudaStream_t, cudaError_t error, void* user_data) {
                  static_cast<std::promise<cudaError_t>*>(user_data)->set_value(error);
                },
                &status, 0),
            cudaSuccess);
  advance_to(std::chrono::seconds(1));
  EXPECT_EQ(status.get_future().get(), cudaErrorECCUncorrectable);
  EXPECT_EQ(host_functions, 0);
  EXPECT_EQ(cudaStreamSynchronize(one_), cudaErrorECCUncorrectable);
  EXPECT_EQ(cudaGetLastError(), cudaErrorECCUncorrectable);
  EXPECT_EQ(cudaFree(device_), cudaErrorECCUncorrectable);
}

TEST_F(Runtime, a_lost_device_answers_before_its_work_is_over) {
  lost_ = true;
  ASSERT_EQ(to_host(one_), cudaSuccess);
  lose_device();
  EXPECT_EQ(cudaStreamSynchronize(one_), cudaErrorLaunchFailure);
  EXPECT_THAT(report(), testing::Contains(HasSubstr("under way at the end")));
}

TEST_F(Runtime, a_lost_device_may_still_write_where_a_copy_was_under_way) {
  lost_ = true;
  static std::vector<std::byte> kept(kSize);  // the device may write there for ever
  ASSERT_EQ(cudaHostRegister(kept.data(), kSize, 0), cudaSuccess);
  void* mapped = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_EQ(cudaHostRegister(mapped, kSize, 0), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(kept.data(), device_, kSize, cudaMemcpyDefault, one_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(mapped, device_, kSize, cudaMemcpyDefault, two_), cudaSuccess);
  lose_device();
  EXPECT_EQ(cudaStreamSynchronize(one_), cudaErrorLaunchFailure);
  const std::vector<std::byte> used(kSize, std::byte{1});
  std::ranges::copy(used, kept.begin());  // used again, as if nothing would write there
  munmap(mapped, kSize);
  EXPECT_EQ(cudaStreamSynchronize(two_), cudaErrorLaunchFailure);
  EXPECT_NE(kept, used);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("were unmapped")));
}

TEST_F(Runtime, leaks_are_reported) {
  void* memory = nullptr;
  cudaEvent_t event = nullptr;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 100), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_EQ(report().size(), 5u + 3u) << "the fixture's two of memory, event and two streams too";
  cudaFree(memory);
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
}

TEST_F(Runtime, work_on_a_capturing_stream_is_refused) {
  set_capturing(one_, true);
  EXPECT_EQ(to_device(one_), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamSynchronize(one_), cudaErrorStreamCaptureUnsupported);
  cudaStreamCaptureStatus status{};
  EXPECT_EQ(cudaStreamIsCapturing(one_, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  set_capturing(one_, false);
}

TEST_F(Runtime, the_null_stream_is_unusable_while_a_blocking_stream_captures) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  set_capturing(blocking, true);
  cudaStreamCaptureStatus status{};
  EXPECT_EQ(cudaStreamIsCapturing(cudaStreamLegacy, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaMemsetAsync(device_, 1, kSize, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamIsCapturing(one_, &status), cudaSuccess) << "others go on";
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  set_capturing(blocking, false);
  EXPECT_EQ(cudaStreamIsCapturing(cudaStreamLegacy, &status), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(Runtime, a_threads_default_stream_is_its_own) {
  ASSERT_EQ(cudaMemsetAsync(device_, 1, kSize, cudaStreamPerThread), cudaSuccess);
  std::thread other([&] {
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess) << "another, and idle";
    EXPECT_EQ(cudaMemsetAsync(device_, 2, kSize, cudaStreamPerThread), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
  });
  other.join();
  ASSERT_EQ(cudaStreamSynchronize(cudaStreamPerThread), cudaSuccess);
  EXPECT_THAT(take_findings(),
              ::testing::Contains(::testing::HasSubstr("nothing orders it after")));
  // It is no non-blocking one: the null stream waits for it.
  ASSERT_EQ(cudaMemsetAsync(device_, 3, kSize, cudaStreamPerThread), cudaSuccess);
  ASSERT_EQ(cudaMemset(device_, 4, kSize), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(*device_bytes(device_, 1), std::byte{4});
  EXPECT_EQ(cudaStreamDestroy(cudaStreamPerThread), cudaErrorInvalidResourceHandle);
}

TEST_F(Runtime, equal_seeds_give_equal_traces) {
  const auto trace = [](std::uint64_t seed) {
    reset(seed);
    void* memory = nullptr;
    cudaMalloc(&memory, kSize);
    cudaStream_t streams[3];
    for (cudaStream_t& stream : streams) cudaStreamCreate(&stream);
    for (int i = 0; i < 30; ++i) {
      cudaMemsetAsync(static_cast<std::byte*>(memory) + i % 3 * 1000, i, 1000, streams[i % 3]);
    }
    cudaDeviceSynchronize();
    const std::uint64_t hash = trace_hash();
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
    cudaFree(memory);
    EXPECT_THAT(report(), IsEmpty());
    return hash;
  };
  EXPECT_EQ(trace(1), trace(1));
  EXPECT_NE(trace(1), trace(2));
  reset(kSeed);
  one_ = two_ = nullptr;
  lost_ = true;
}

TEST(ByHand, the_clock_stands_until_it_is_moved) {
  reset(3, {.pace = Pace::kByHand});
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kSize), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kSize, nullptr), cudaSuccess);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  const auto end = next_completion();
  ASSERT_TRUE(end);
  advance_to(*end - std::chrono::nanoseconds(1));
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  advance_to(*end);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaSuccess);
  EXPECT_FALSE(next_completion());
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_THAT(report(), IsEmpty());
}

TEST_F(Runtime, an_injected_error_is_told_with_what_it_struck) {
  EXPECT_EQ(struck(), "");
  fail_call(2, cudaErrorInvalidValue);
  EXPECT_EQ(to_device(one_), cudaSuccess);
  EXPECT_EQ(struck(), "");
  EXPECT_EQ(cudaEventRecord(event_, one_), cudaErrorInvalidValue);
  EXPECT_EQ(struck(), "cudaEventRecord");
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  fail_completion(1, cudaErrorECCUncorrectable);
  EXPECT_EQ(to_host(two_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(two_), cudaErrorECCUncorrectable);
  EXPECT_THAT(struck(), HasSubstr("cudaMemcpyAsync of 4096 bytes"));
  lost_ = true;
}

class QuietRuntime : public Runtime {
 protected:
  QuietRuntime() : Runtime({.pace = Pace::kWhenQuiet}) {}
};

TEST_F(QuietRuntime, time_stands_still_while_a_thread_runs) {
  using std::chrono::steady_clock;
  std::atomic<bool> runs = false;
  std::chrono::nanoseconds before{};
  std::chrono::nanoseconds after{};
  std::thread busy([&] {
    before = now();
    runs = true;
    const auto until = steady_clock::now() + std::chrono::milliseconds(50);
    while (steady_clock::now() < until) {
    }
    after = now();
  });
  while (!runs) {
  }
  EXPECT_EQ(to_device(one_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_GT(now(), before);
  busy.join();
  EXPECT_EQ(after, before) << "the copy ended beside a thread that might have queued another";
}

using RuntimeDeathTest = Runtime;

TEST_F(RuntimeDeathTest, the_cpu_cannot_touch_device_memory) {
  EXPECT_DEATH(*static_cast<volatile int*>(device_) = 1, "the CPU touched device memory");
}

TEST_F(RuntimeDeathTest, a_wait_that_nothing_ends_ends_with_a_list) {
  const auto wait_for_ever = [] {
    reset(1, {.host_function_patience = std::chrono::milliseconds(1),
              .hang_after = std::chrono::milliseconds(200)});
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaLaunchHostFunc(
        stream, [](void*) { std::promise<void>().get_future().wait(); }, nullptr);
    cudaStreamSynchronize(stream);
  };
  EXPECT_DEATH(wait_for_ever(), "nothing can go on:\n  stream 2: a host function runs on the host");
}

TEST_F(RuntimeDeathTest, findings_that_nobody_took_end_the_process_with_1) {
  EXPECT_EXIT(
      {
        cudaFree(host_);
        std::exit(0);
      },
      testing::ExitedWithCode(1), "is not the start of an allocation");
}

}  // namespace
}  // namespace ziggurat::cuda_double
