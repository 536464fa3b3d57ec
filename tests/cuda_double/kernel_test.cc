// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernel_test.cc: kernels from nvcc's PTX have g++'s bits; mistakes in kernels
// and in what surrounds them are seen.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <chrono>
#include <random>
#include <vector>

#include "tests/cuda_double/kernel_arrays.h"
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/kernels/apply_rule.h"
#include "tests/cuda_double/kernels/launch.h"
#include "tests/cuda_double/kernels/memory.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::cuda_double {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

TEST_F(Kernels, parameters_by_value_and_local_memory) {
  Table table{};
  for (int i = 0; i < 12; ++i) table.values[i] = 1000 * i - 5000;
  table.scale = 65535;
  const Array<std::int32_t> out(1000);
  launch_permuted(table, out.get(), 1000, nullptr);
  const std::vector<std::int32_t> got = out.values();
  for (std::uint32_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], permuted(table, i)) << i;
}

TEST_F(Kernels, narrow_loads_keep_their_sign) {
  std::vector<std::int8_t> a(256);
  std::vector<std::int16_t> b(256);
  std::vector<std::uint8_t> c(256);
  for (int i = 0; i < 256; ++i) {
    const auto n = static_cast<std::size_t>(i);
    a[n] = static_cast<std::int8_t>(i - 128);
    b[n] = static_cast<std::int16_t>(i * 257 - 32768);
    c[n] = static_cast<std::uint8_t>(255 - i);
  }
  const Array<std::int8_t> device_a(a);
  const Array<std::int16_t> device_b(b);
  const Array<std::uint8_t> device_c(c);
  const Array<std::int32_t> out(256);
  launch_widened(device_a.get(), device_b.get(), device_c.get(), out.get(), 256, nullptr);
  const std::vector<std::int32_t> got = out.values();
  for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(got[i], widened(a[i], b[i], c[i])) << i;
}

TEST_F(Kernels, vectors_and_constant_memory) {
  constexpr unsigned kBlocks = 3;
  const std::vector<float> x = hard_values(kBlocks * 128, 8);
  const Array<float> device_x(x);
  const Array<float> out(kBlocks * 128);
  launch_vectors(device_x.get(), out.get(), kBlocks, nullptr);
  const std::vector<float> got = out.values();
  constexpr float kFactors[] = {2, 3, 5, 7};
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t from = i / 128 * 128 + (31 - i % 128 / 4) * 4 + i % 4;
    const float factor = i % 4 == 0 ? kFactors[from % 128 / 4 % 4] : 1;
    ASSERT_EQ(got[i], x[from] * factor) << i;
  }
}

TEST_F(Kernels, grids_and_blocks_of_three_dimensions) {
  const dim3 grid(3, 2, 5);
  const dim3 block(7, 3, 2);
  const Array<std::uint32_t> out(30 * 42);
  launch_indices(out.get(), grid, block, 42 * sizeof(std::uint32_t), nullptr);
  const std::vector<std::uint32_t> got = out.values();
  for (std::uint32_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], i);
  launch_indices(out.get(), grid, block, 41 * sizeof(std::uint32_t), nullptr);
  EXPECT_THAT(fault(cudaErrorIllegalAddress), ElementsAre(HasSubstr("of shared memory at 164")));
}

TEST_F(Kernels, every_atomic_operation) {
  constexpr unsigned kThreads = 300;
  Counters start{};
  start.largest = -100;
  start.smallest = 1000;
  const Array<Counters> device(std::vector<Counters>{start});
  launch_atomics(device.get(), kThreads, nullptr);
  const Counters got = device.values()[0];
  EXPECT_EQ(got.float_sum, 150.0f);
  EXPECT_EQ(got.double_sum, 75.0);
  EXPECT_EQ(got.largest, 294);
  EXPECT_EQ(got.smallest, 3u);
  EXPECT_EQ(got.bits, ~0u);
  EXPECT_EQ(got.wrapped, kThreads % 10);
  EXPECT_EQ(got.swapped_sum, kThreads * (kThreads - 1) / 2);
  EXPECT_EQ(got.sum64, std::uint64_t{kThreads} << 33);
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
