// SPDX-License-Identifier: Apache-2.0
// tests/integrations/device_mlp_test.cc: a trainer whose layers run on the device: on a GPU, which
// is the double of the CUDA runtime with the kernels' own PTX, with the bits that it has on the
// CPU.
#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "base/bytes.h"
#include "integrations/device_mlp/mlp.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat::device_mlp {
namespace {

using testing::ScratchDirectory;

std::vector<std::uint8_t> read_text() {
  std::ifstream file(ZIGGURAT_TEST_TEXT, std::ios::binary);
  std::stringstream all;
  all << file.rdbuf();
  const std::string read = all.str();
  return {read.begin(), read.end()};
}

const std::vector<std::uint8_t>& text() {
  static const std::vector<std::uint8_t> read = read_text();
  return read;
}

EngineConfig config_for(const MlpShape& shape, const std::string& directory,
                        const std::string& placement) {
  EngineConfig config;
  config.store = {{directory}};
  config.host_budget_bytes = 8 * kMiB;
  config.trainer_device_bytes = Mlp::device_bytes(shape);
  config.placement = parse_placement(placement);
  config.run_identity = "mlp";
  config.numerics_fingerprint = "device_mlp";
  return config;
}

constexpr std::uint64_t kDeviceBytes = 2 * kMiB;
constexpr const char* kOnDrive = "params=nvme,grads=host,optimizer=nvme";

std::vector<double> losses_on_cpu(const MlpShape& shape, std::uint64_t steps,
                                  const std::string& placement) {
  const ScratchDirectory directory;
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  const auto device = HostDevice::create(runtime->reactor, kDeviceBytes);
  const auto engine = Engine::open(mlp_model(shape), config_for(shape, directory.path(), placement),
                                   *runtime, *device, initialize_mlp);
  const auto machine = make_machine(*device);
  Mlp mlp(*engine, *device, *machine, shape);
  std::vector<double> losses;
  for (std::uint64_t i = 0; i < steps; ++i) losses.push_back(mlp.step(text(), i, 0.01F));
  return losses;
}

std::vector<double> losses_on_gpu(const MlpShape& shape, std::uint64_t steps,
                                  const std::string& placement, std::uint64_t seed) {
  cuda_double::reset(seed);
  std::vector<double> losses;
  {
    const ScratchDirectory directory;
    const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
    const auto device = CudaDevice::create(runtime->reactor, {.capacity_bytes = kDeviceBytes});
    const auto engine =
        Engine::open(mlp_model(shape), config_for(shape, directory.path(), placement), *runtime,
                     *device, initialize_mlp);
    const auto machine = make_machine(*device, 64 * kKiB);
    Mlp mlp(*engine, *device, *machine, shape);
    for (std::uint64_t i = 0; i < steps; ++i) losses.push_back(mlp.step(text(), i, 0.01F));
  }
  EXPECT_THAT(cuda_double::report(), ::testing::IsEmpty()) << "seed " << seed;
  return losses;
}

TEST(DeviceMlp, LearnsToGuessTheNextByte) {
  const std::vector<double> losses = losses_on_cpu({.rows = 32}, 120, "all=host");
  EXPECT_GT(losses.front(), 5.4);  // of 256 bytes, it knows nothing
  double last = 0;
  for (std::size_t i = losses.size() - 10; i < losses.size(); ++i) last += losses[i] / 10;
  EXPECT_LT(last, 4.2);
}

TEST(DeviceMlp, HasTheSameBitsOnAGpuAndOnTheCpu) {
  const MlpShape shape;
  for (const char* const placement : {"all=host", kOnDrive}) {
    const std::vector<double> expected = losses_on_cpu(shape, 4, placement);
    for (std::uint64_t seed = 1; seed <= 2; ++seed)
      EXPECT_EQ(losses_on_gpu(shape, 4, placement, seed), expected) << placement << ", " << seed;
  }
}

}  // namespace
}  // namespace ziggurat::device_mlp
