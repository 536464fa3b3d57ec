// SPDX-License-Identifier: Apache-2.0
// tests/core/compute_test.cc: the operations on a device's bytes, by the CPU and by kernels on the
// double of the CUDA runtime: the same bits.
#include "core/compute/compute.h"

#include <gmock/gmock.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/runtime/async.h"
#include "base/runtime/worker_pool.h"
#include "collectives/quantize/quantized_block.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/aligned_memory.h"
#include "tests/support/hard_floats.h"
#include "tiers/device/cuda_device.h"
#include "tiers/device/host_device.h"
#include "tiers/store/record_format.h"

namespace ziggurat::testing {
namespace {

constexpr std::uint64_t kRoundMax = 8 * kTileElements;

/// A device with its operations, and host memory that it can copy.
class Machine {
 public:
  explicit Machine(bool gpu) : workers_({.threads = 2, .cpus = {}}) {
    if (gpu) {
      device_ = CudaDevice::create(reactor_, {.capacity_bytes = 16 * kMiB});
    } else {
      device_ = HostDevice::create(reactor_, 16 * kMiB);
    }
    registration_ = device_->register_host_memory(host_.bytes());
    compute_ = make_compute(*device_, reactor_, workers_,
                            {.round_count_max = kRoundMax, .quantizes = true});
    stream_ = device_->create_stream("test");
  }

  Compute& compute() { return *compute_; }
  DeviceBuffer with(std::span<const std::byte> bytes) {
    DeviceBuffer buffer = device_->allocate(bytes.size(), Purpose::kStaging);
    std::memcpy(host_.bytes().data(), bytes.data(), bytes.size());
    move({.destination = buffer.data(),
          .source = host_.bytes().data(),
          .size_bytes = bytes.size(),
          .direction = Stream::Direction::kToDevice});
    return buffer;
  }
  std::vector<std::byte> bytes_of(const DeviceBuffer& buffer) {
    move({.destination = host_.bytes().data(),
          .source = buffer.data(),
          .size_bytes = buffer.size_bytes(),
          .direction = Stream::Direction::kToHost});
    const auto begin = host_.bytes().begin();
    return {begin, begin + static_cast<std::ptrdiff_t>(buffer.size_bytes())};
  }
  /// Host memory for results.
  std::span<std::byte> host() { return host_.bytes(); }
  void run(Task<> task) { reactor_.block_on(std::move(task)); }
  void wait(Task<Event> task) {
    const Event event = reactor_.block_on(std::move(task));
    run(event.wait());
  }

 private:
  void move(const Stream::Copy& request) { run(copy(reactor_, *stream_, request)); }

  test::AlignedMemory host_{8 * kMiB};
  Reactor reactor_;
  WorkerPool workers_;
  std::unique_ptr<Device> device_;
  std::shared_ptr<HostRegistration> registration_;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<Stream> stream_;
};

std::vector<std::byte> hard_floats(std::size_t count, std::uint32_t seed) {
  HardFloats hard(seed);
  std::vector<float> values(count);
  for (float& value : values) value = hard.next();
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

using Results = std::vector<std::vector<std::byte>>;

Results cleared(Machine& machine) {
  DeviceBuffer buffer = machine.with(hard_floats(3 * kTileElements, 1));
  machine.wait(machine.compute().clear(device_span(buffer).subspan(512, 2 * kTileElements)));
  return {machine.bytes_of(buffer)};
}

/// In place, with and without sums.
Results rounded(Machine& machine) {
  Results results;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool summed : {true, false}) {
      DeviceBuffer buffer = machine.with(hard_floats(3 * kTileElements, 2));
      std::ranges::fill(machine.host().last(kMiB), std::byte{0});
      const auto sums = reinterpret_cast<double*>(machine.host().last(kMiB).data());
      const DeviceSpan<float> values = device_span(buffer).as<float>();
      const Compute::Rounding rounding{
          .values = values,
          .out = {dtype, device_span(buffer).first(values.size() * size_bytes(dtype))},
          .squares = summed ? std::span(sums, 3) : std::span<double>()};
      machine.run(machine.compute().round(rounding));
      const auto all = machine.host().last(kMiB);
      results.emplace_back(all.begin(), all.end());
      results.push_back(machine.bytes_of(buffer));
      results.back().resize(values.size() * size_bytes(dtype));  // what is left is anybody's
    }
  }
  return results;
}

/// Rows at once are as each by itself, and what lies between them stays.
Results rounded_in_rows(Machine& machine) {
  constexpr std::uint64_t kRows = 3;
  constexpr std::uint64_t kStride = 2 * kTileElements * sizeof(float);
  const std::vector<std::byte> values = hard_floats(kRows * 2 * kTileElements, 6);
  const DeviceBuffer at_once = machine.with(values);
  const DeviceBuffer one_by_one = machine.with(values);
  const auto rounding = [](const DeviceBuffer& buffer) {
    return Compute::Rounding{
        .values = device_span(buffer).as<float>().first(kTileElements),
        .out = {DType::kBFloat16, device_span(buffer).first(2 * kTileElements)},
        .squares = {},
        .rows = kRows,
        .stride_bytes = kStride};
  };
  machine.run(machine.compute().round(rounding(at_once)));
  for (std::uint64_t row = 0; row < kRows; ++row)
    machine.run(machine.compute().round(rounding(one_by_one).row(row)));
  const std::vector<std::byte> bytes = machine.bytes_of(at_once);
  EXPECT_TRUE(bytes == machine.bytes_of(one_by_one));
  Results results;
  for (std::uint64_t row = 0; row < kRows; ++row) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(row * kStride);
    results.emplace_back(begin, begin + 2 * kTileElements);
    EXPECT_TRUE(
        std::equal(begin + kStride / 2, begin + kStride,
                   values.begin() + static_cast<std::ptrdiff_t>(row * kStride) + kStride / 2));
  }
  return results;
}

/// A few blocks, and more than a GPU quantizes at once.
Results quantized(Machine& machine) {
  Results results;
  for (const QuantizedBits bits : {QuantizedBits::k8, QuantizedBits::k4}) {
    for (const std::size_t count : {std::size_t{3} * kQuantizedBlock, std::size_t{300'032}}) {
      const DeviceBuffer buffer = machine.with(hard_floats(count, 3));
      const std::span<std::byte> codes = machine.host().last(quantized_bytes(bits, count));
      const Compute::Quantizing quantizing{
          .values = device_span(buffer).as<float>(), .bits = bits, .codes = codes};
      machine.run(machine.compute().quantize(quantizing));
      results.emplace_back(codes.begin(), codes.end());
    }
  }
  return results;
}

Results updated(Machine& machine) {
  Results results;
  for (const StateFormat format : {StateFormat::kFp32, StateFormat::k8Bit}) {
    const std::size_t record_bytes = record_format(OptimizerKind::kAdamW, format).record_bytes(2);
    DeviceBuffer record = machine.with(std::vector<std::byte>(record_bytes));
    DeviceBuffer grad = machine.with(hard_floats(kTileElements, 4));
    DeviceBuffer param = machine.with(std::vector<std::byte>(4 * kTileElements));
    const OptimizerStep step = OptimizerStep::make({.learning_rate = 0.01F,
                                                    .beta1 = 0.9F,
                                                    .beta2 = 0.95F,
                                                    .eps = 1e-8F,
                                                    .weight_decay = 0.1F,
                                                    .grad_scale = 1,
                                                    .t = 1});
    const std::vector<DecayRun> runs{{0, 100, true}, {100, 2 * kTileElements, false}};
    const Compute::Update update{.steps = step,
                                 .format = format,
                                 .record = device_span(record),
                                 .grad = {DType::kBFloat16, device_span(grad)},
                                 .param = {DType::kBFloat16, device_span(param)},
                                 .runs = runs};
    machine.run(machine.compute().update(update));
    for (const DeviceBuffer* const buffer : {&record, &grad, &param})
      results.push_back(machine.bytes_of(*buffer));
  }
  return results;
}

struct Operation {
  const char* name;
  Results (*results)(Machine& machine);
};
void PrintTo(const Operation& operation, std::ostream* out) { *out << operation.name; }

class ComputeOperation : public ::testing::TestWithParam<Operation> {};

TEST_P(ComputeOperation, HasTheSameBitsOnTheGpuAndOnTheCpu) {
  Machine cpu(/*gpu=*/false);
  const Results expected = GetParam().results(cpu);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    cuda_double::reset(seed);
    {
      Machine gpu(/*gpu=*/true);
      EXPECT_TRUE(GetParam().results(gpu) == expected) << "seed " << seed;
    }
    EXPECT_THAT(cuda_double::report(), ::testing::IsEmpty()) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ComputeOperation,
                         ::testing::Values(Operation{"Clear", cleared}, Operation{"Round", rounded},
                                           Operation{"RoundRows", rounded_in_rows},
                                           Operation{"Quantize", quantized},
                                           Operation{"Update", updated}),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace ziggurat::testing
