// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/sections_test.cc: the CPU in the place of a kernel.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <array>
#include <cstring>

#include "base/error.h"
#include "tests/cuda_double/cuda_test.h"

namespace ziggurat::cuda_double {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::size_t kBytes = 8192;

/// Two streams, and device memory whose view is of the CPU's within sections.
class Sections : public CudaTest {
 protected:
  explicit Sections(Mischief mischief = Mischief::kNone)
      : CudaTest({.has_sections = true, .mischief = mischief}) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&one_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&two_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&device_, kBytes), cudaSuccess);
    EXPECT_EQ(cudaMallocHost(&host_, kBytes), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    view_ = section_view(device_, kBytes);
  }
  void TearDown() override {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaFree(device_);
    cudaFreeHost(host_);
    cudaEventDestroy(event_);
    cudaStreamDestroy(one_);
    cudaStreamDestroy(two_);
    CudaTest::TearDown();
  }
  void copy_up(std::uint8_t value, cudaStream_t stream) {
    std::memset(host_, value, kBytes);
    ASSERT_EQ(cudaMemcpyAsync(device_, host_, kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  }
  cudaError_t begin(cudaStream_t stream, bool writes = false) {
    const std::array memory{
        SectionMemory{.address = device_, .size_bytes = kBytes, .writes = writes}};
    return begin_section(stream, memory);
  }

  cudaStream_t one_ = nullptr;
  cudaStream_t two_ = nullptr;
  cudaEvent_t event_ = nullptr;
  void* device_ = nullptr;
  void* host_ = nullptr;
  std::byte* view_ = nullptr;
};

TEST_F(Sections, come_after_what_their_stream_was_given_and_before_what_it_gets) {
  copy_up(7, one_);
  ASSERT_EQ(begin(one_, true), cudaSuccess);
  EXPECT_EQ(view_[0], std::byte{7});
  EXPECT_EQ(cudaMemcpyAsync(host_, device_, kBytes, cudaMemcpyDeviceToHost, one_), cudaSuccess);
  view_[kBytes - 1] = std::byte{8};
  end_section(one_);
  ASSERT_EQ(cudaStreamSynchronize(one_), cudaSuccess);
  EXPECT_EQ(static_cast<std::byte*>(host_)[0], std::byte{7});
  EXPECT_EQ(static_cast<std::byte*>(host_)[kBytes - 1], std::byte{8});
}

TEST_F(Sections, let_no_more_time_go_on_than_their_stream_needs) {
  copy_up(7, two_);
  ASSERT_EQ(cudaStreamSynchronize(two_), cudaSuccess);
  for (int i = 0; i < 20; ++i)
    ASSERT_EQ(cudaMemcpyAsync(host_, device_, kBytes, cudaMemcpyDeviceToHost, two_), cudaSuccess);
  const std::uint64_t before = completions();
  ASSERT_EQ(begin(one_), cudaSuccess);
  EXPECT_LT(completions() - before, 20u);
  end_section(one_);
}

TEST_F(Sections, race_with_what_nothing_orders_after_them_or_before) {
  copy_up(7, two_);
  ASSERT_EQ(begin(one_), cudaSuccess);
  end_section(one_);
  EXPECT_EQ(cudaStreamSynchronize(two_), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("nothing orders it after")));
  copy_up(8, two_);
  ASSERT_EQ(cudaEventRecord(event_, two_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(one_, event_, 0), cudaSuccess);
  ASSERT_EQ(begin(one_), cudaSuccess);
  EXPECT_EQ(view_[0], std::byte{8});
  end_section(one_);
}

TEST_F(Sections, find_memory_that_nobody_has_and_a_stream_that_is_in_none) {
  const std::array memory{
      SectionMemory{.address = static_cast<std::byte*>(device_) + kBytes - 4, .size_bytes = 8}};
  EXPECT_EQ(begin_section(one_, memory), cudaErrorInvalidValue);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("into the allocation of 8192 bytes")));
  EXPECT_THROW(end_section(one_), Error);
}

class SectionsWithoutWaits : public Sections {
 protected:
  SectionsWithoutWaits() : Sections(Mischief::kNoWaits) {}
};

TEST_F(SectionsWithoutWaits, are_seen_to_lack_them) {
  copy_up(8, two_);
  ASSERT_EQ(cudaEventRecord(event_, two_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(one_, event_, 0), cudaSuccess);
  ASSERT_EQ(begin(one_), cudaSuccess);
  end_section(one_);
  EXPECT_EQ(cudaStreamSynchronize(two_), cudaSuccess);
  EXPECT_THAT(take_findings(), ElementsAre(HasSubstr("nothing orders it after")));
}

using SectionsDeathTest = Sections;

TEST_F(SectionsDeathTest, the_cpu_cannot_touch_the_memory_when_they_have_ended) {
  copy_up(7, one_);
  ASSERT_EQ(begin(one_), cudaSuccess);
  end_section(one_);
  EXPECT_DEATH(*const_cast<volatile std::byte*>(view_) = std::byte{1},
               "the CPU touched device memory");
}

}  // namespace
}  // namespace ziggurat::cuda_double
