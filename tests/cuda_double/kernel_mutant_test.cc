// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernel_mutant_test.cc: mistakes in kernels, in how they are compiled and in
// what surrounds them are seen.
#include <gmock/gmock.h>

#include <vector>

#include "tests/cuda_double/kernel_arrays.h"
#include "tests/cuda_double/kernels/launch.h"

namespace ziggurat::cuda_double {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(Kernels, a_launch_that_cannot_be_is_refused) {
  unsigned count = 0;
  const float* in = nullptr;
  float* out = nullptr;
  void* arguments[] = {&in, &out, &count};
  const auto launch = [&](const void* stub, dim3 grid, dim3 block, std::size_t shared_bytes) {
    return cudaLaunchKernel(stub, grid, block, arguments, shared_bytes, nullptr);
  };
  EXPECT_EQ(launch(product_sum_stub(), 1, 32, 0), cudaSuccess);
  EXPECT_EQ(launch(product_sum_stub(), 0, 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(product_sum_stub(), 1, 1025, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(product_sum_stub(), dim3(1, 65536), 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(product_sum_stub(), 1, 32, 49153), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(launch(&count, 1, 32, 0), cudaErrorInvalidDeviceFunction);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("no module registered")));
}

TEST_F(Kernels, a_missing_barrier_is_a_race) {
  const Array<float> x(std::vector<float>(64, 1.0f));
  const Array<float> out(64);
  launch_without_barrier(x.get(), out.get(), nullptr);
  EXPECT_THAT(fault(cudaErrorLaunchFailure), ElementsAre(AllOf(HasSubstr("without_barrier_kernel"),
                                                               HasSubstr("a race in shared"))));
}

TEST_F(Kernels, a_block_that_overwrites_what_another_reads_is_a_race) {
  const Array<float> x(std::vector<float>(256, 1.0f));
  launch_overtaken(x.get(), 4, nullptr);
  EXPECT_THAT(
      fault(cudaErrorLaunchFailure),
      ElementsAre(AllOf(HasSubstr("overtaken_kernel"), HasSubstr("a race between blocks"))));
}

TEST_F(Kernels, blocks_may_store_a_flag_only_by_strong_stores) {
  const Array<unsigned> flag(std::vector<unsigned>(1));
  launch_flag(flag.get(), true, nullptr);
  EXPECT_EQ(flag.values()[0], 1u);
  launch_flag(flag.get(), false, nullptr);
  EXPECT_THAT(fault(cudaErrorLaunchFailure), ElementsAre(HasSubstr("a race between blocks")));
}

TEST_F(Kernels, one_element_too_many_is_an_illegal_address) {
  const Array<float> x(std::vector<float>(101, 1.0f));
  const Array<float> out(100);
  launch_one_too_many(x.get(), out.get(), 100, nullptr);
  EXPECT_THAT(fault(cudaErrorIllegalAddress),
              ElementsAre(AllOf(HasSubstr("one_too_many_kernel"), HasSubstr("thread 36"),
                                HasSubstr("0 bytes past the end of the allocation of 400 bytes"))));
}

TEST_F(Kernels, a_barrier_in_a_branch_is_seen) {
  const Array<float> out(64);
  launch_barrier_in_branch(out.get(), nullptr);
  EXPECT_THAT(fault(cudaErrorLaunchFailure), ElementsAre(HasSubstr("waits at a barrier")));
}

TEST_F(Kernels, a_shuffle_from_a_lane_that_takes_no_part_is_seen) {
  const Array<float> out(std::vector<float>(64, 1.0f));
  launch_shuffle_from_nobody(out.get(), nullptr);
  EXPECT_THAT(fault(cudaErrorLaunchFailure), ElementsAre(HasSubstr("takes no part")));
}

TEST_F(Kernels, a_misaligned_address_is_seen) {
  const Array<std::uint8_t> x(64);
  const Array<float> out(1);
  launch_misaligned(x.get(), out.get(), nullptr);
  EXPECT_THAT(fault(cudaErrorMisalignedAddress), ElementsAre(HasSubstr("are not aligned")));
}

TEST_F(Kernels, a_fused_multiply_add_gives_other_bits) {
  constexpr unsigned kCount = 1000;
  const std::vector<float> xyz = hard_values(3 * kCount, 4);
  const Array<float> device(xyz);
  const Array<float> plain(kCount);
  const Array<float> fused(kCount);
  launch_product_sum(device.get(), plain.get(), kCount, nullptr);
  launch_product_sum_fused(device.get(), fused.get(), kCount, nullptr);
  const std::vector<float> got = plain.values();
  const std::vector<float> mutant = fused.values();
  int differ = 0;
  for (unsigned i = 0; i < kCount; ++i) {
    const float want = xyz[i] * xyz[kCount + i] + xyz[2 * kCount + i];
    EXPECT_EQ(got[i], want);
    differ += mutant[i] != want ? 1 : 0;
  }
  EXPECT_GT(differ, 100);
}

TEST_F(Kernels, approximate_arithmetic_does_not_run) {
  const Array<float> device(300);
  launch_quotient_fast(device.get(), device.get(), 100, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDeviceFunction);
  EXPECT_THAT(take_findings(),
              ElementsAre(AllOf(HasSubstr("quotient_kernel"), HasSubstr("div.approx.ftz.f32"))));
}

TEST_F(Kernels, kernels_race_by_what_they_touched) {
  constexpr unsigned kCount = 100;
  const Array<float> xyz(hard_values(3 * kCount, 5));
  const Array<float> out(2 * kCount);
  cudaStream_t one = nullptr;
  cudaStream_t two = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  launch_product_sum(xyz.get(), out.get(), kCount, one);
  launch_product_sum(xyz.get(), out.get() + kCount, kCount, two);  // beside it: no race
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(take_findings(), IsEmpty());
  launch_product_sum(xyz.get(), out.get(), kCount, one);
  launch_product_sum(xyz.get(), out.get() + 1, kCount, two);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("nothing orders it after kernel")));
  launch_product_sum(xyz.get(), out.get(), kCount, one);
  ASSERT_EQ(cudaEventRecord(event, one), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(two, event, 0), cudaSuccess);
  launch_product_sum(xyz.get(), out.get() + 1, kCount, two);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(one), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(two), cudaSuccess);
}

TEST_F(Kernels, memory_that_was_freed_before_the_kernel_ran_is_an_illegal_address) {
  const Array<float> xyz(hard_values(300, 6));
  void* out = nullptr;
  ASSERT_EQ(cudaMalloc(&out, 400), cudaSuccess);
  launch_product_sum(xyz.get(), static_cast<float*>(out), 100, nullptr);
  ASSERT_EQ(cudaFree(out), cudaSuccess);
  EXPECT_THAT(fault(cudaErrorIllegalAddress), Contains(HasSubstr("product_sum_kernel")));
}

}  // namespace
}  // namespace ziggurat::cuda_double
