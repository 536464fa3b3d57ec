// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernel_test.cc: kernels from nvcc's PTX have g++'s bits; mistakes in kernels
// and in what surrounds them are seen.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <chrono>
#include <random>
#include <vector>

#include "tests/cuda_double/cuda_test.h"
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/kernels/apply_rule.h"
#include "tests/cuda_double/kernels/launch.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::cuda_double {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

/// Words of which many are hard as floats, doubles and integers.
std::vector<std::uint64_t> words(std::size_t count, std::uint32_t seed) {
  ziggurat::testing::HardFloats floats(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kHard[] = {0,
                                     1,
                                     ~0ull,
                                     1ull << 63,
                                     1ull << 31,
                                     0x7ff0000000000000,
                                     0xfff0000000000000,
                                     0x7ff8000000000001,
                                     0x000fffffffffffff,
                                     0x8000000000000001,
                                     0x7fefffffffffffff,
                                     0x3ff0000000000000};
  std::vector<std::uint64_t> result(count);
  for (std::uint64_t& word : result) {
    const std::uint64_t choice = random();
    word = random();
    if (choice % 4 == 0)
      word = std::uint64_t{ziggurat::testing::to_bits(floats.next())} | word << 32;
    if (choice % 4 == 1) word = word >> (choice >> 8) % 64;
    if (choice % 16 == 2) word = kHard[(choice >> 8) % std::size(kHard)];
    if (choice % 16 == 6) {
      const double value = static_cast<double>(floats.next()) * 1.0000000001;
      word = std::bit_cast<std::uint64_t>(value);
    }
  }
  return result;
}

TEST_F(Kernels, every_class_of_instruction_has_the_bits_of_gcc) {
  constexpr std::uint32_t kCount = 20011;
  const std::vector<std::uint64_t> x = words(kCount, 1);
  const std::vector<std::uint64_t> y = words(kCount, 2);
  const Array<std::uint64_t> device_x(x);
  const Array<std::uint64_t> device_y(y);
  for (int rule = 0; rule < static_cast<int>(Rule::kCount); ++rule) {
    const Array<std::uint64_t> out(kCount);
    launch_rule(static_cast<Rule>(rule), device_x.get(), device_y.get(), out.get(), kCount,
                nullptr);
    const std::vector<std::uint64_t> got = out.values();
    int wrong = 0;
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const std::uint64_t want = apply(static_cast<Rule>(rule), x[i], y[i]);
      if (got[i] == want) continue;
      if (++wrong <= 3) {
        ADD_FAILURE() << "rule " << rule << " of " << std::hex << x[i] << " and " << y[i] << ": "
                      << got[i] << ", not " << want;
      }
    }
    EXPECT_EQ(wrong, 0) << "rule " << rule;
  }
}

float sum_of_block(const float* x) {
  std::vector<float> part(x, x + 256);
  for (std::size_t half = 128; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) part[i] = part[i] + part[i + half];
  }
  return part[0];
}

TEST_F(Kernels, shared_memory_barriers_and_shuffles) {
  constexpr unsigned kBlocks = 9;
  std::mt19937 random(3);
  std::vector<float> x(kBlocks * 256);
  for (float& value : x) value = std::uniform_real_distribution<float>(-1, 1)(random);
  const Array<float> device_x(x);
  const Array<float> sums(kBlocks);
  launch_sum(device_x.get(), sums.get(), kBlocks, nullptr);
  const std::vector<float> got = sums.values();
  for (unsigned block = 0; block < kBlocks; ++block) {
    EXPECT_EQ(got[block], sum_of_block(x.data() + block * 256)) << block;
  }
}

TEST_F(Kernels, atomics_votes_and_variables_of_a_module) {
  std::vector<std::uint8_t> x(1000);
  unsigned want[5] = {};
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<std::uint8_t>(i * 7 + 255);
    want[x[i] % 4] += std::vector<unsigned>{1, 10, 100, 1000}[x[i] % 4] * 3;
  }
  want[4] = 1;
  const Array<std::uint8_t> device_x(x);
  const Array<unsigned> bins(std::vector<unsigned>(5));
  launch_histogram(device_x.get(), bins.get(), 1000, nullptr);
  EXPECT_THAT(bins.values(), ::testing::ElementsAreArray(want));
}

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

std::vector<float> hard_values(unsigned count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = std::uniform_real_distribution<float>(-2, 2)(random);
  return values;
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

TEST_F(Kernels, a_twin_runs_in_its_place_and_is_checked_as_it_was) {
  constexpr unsigned kCount = 100;
  const Array<float> xyz(hard_values(3 * kCount, 7));
  const Array<float> out(kCount);
  int runs = 0;
  set_twin(product_sum_stub(), [&runs](const TwinLaunch& launch) {
    ++runs;
    const auto count = launch.parameter<unsigned>(2);
    const auto in = launch.reads(launch.parameter<const float*>(0), std::size_t{3} * count);
    const auto to = launch.writes(launch.parameter<float*>(1), count);
    for (unsigned i = 0; i < count; ++i) to[i] = in[i] * in[count + i] + in[2 * count + i];
  });
  launch_product_sum(xyz.get(), out.get(), kCount, nullptr);
  const std::vector<float> by_twin = out.values();
  launch_product_sum(xyz.get(), out.get(), kCount + 1, nullptr);
  EXPECT_THAT(fault(cudaErrorIllegalAddress), ElementsAre(HasSubstr("past the end")));
  EXPECT_EQ(runs, 2);
  set_twin(product_sum_stub(), {});
  reset(kSeed);
  const Array<float> again(hard_values(3 * kCount, 7));
  const Array<float> result(kCount);
  launch_product_sum(again.get(), result.get(), kCount, nullptr);
  EXPECT_EQ(result.values(), by_twin);
  EXPECT_EQ(runs, 2);
}

TEST_F(Kernels, instructions_run_fast_enough_for_campaigns) {
  constexpr std::uint32_t kCount = 100000;
  const Array<std::uint64_t> x(words(kCount, 1));
  const Array<std::uint64_t> out(kCount);
  const std::uint64_t before = instructions_executed();
  const auto start = std::chrono::steady_clock::now();
  launch_rule(Rule::kInt32, x.get(), x.get(), out.get(), kCount, nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const double rate = static_cast<double>(instructions_executed() - before) / took.count();
  RecordProperty("instructions_per_second", std::to_string(rate));
  std::printf("%.1f M instructions a second\n", rate / 1e6);
  EXPECT_GT(instructions_executed() - before, kCount * 20u);
}

}  // namespace
}  // namespace ziggurat::cuda_double
