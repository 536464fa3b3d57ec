// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/program.cc: opens the device that was asked for, and makes steps.
#include "integrations/device_mlp/program.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <fstream>
#include <iterator>
#include <optional>
#include <ostream>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace ziggurat::device_mlp {
namespace {

std::vector<std::uint8_t> read_text(const ProgramOptions& options) {
  std::ifstream file(options.text_path, std::ios::binary);
  const std::vector<char> read{std::istreambuf_iterator<char>(file), {}};
  if (read.size() <= options.shape.context) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--text {}: only {} bytes could be read, but a guess is made from {}: "
                            "give a file with more text",
                            options.text_path, read.size(), options.shape.context));
  }
  return {read.begin(), read.end()};
}

/// Returns the GPU's number, or none for the emulated device.
std::optional<int> gpu_of(const std::string& device) {
  if (device == "host") return std::nullopt;
  if (device == "auto") return cuda_devices().gpus.empty() ? std::nullopt : std::optional(0);
  constexpr std::string_view kCuda = "cuda:";
  int index = -1;
  if (device.starts_with(kCuda)) {
    const char* const end = device.data() + device.size();
    const auto [rest, error] = std::from_chars(device.data() + kCuda.size(), end, index);
    if (rest != end || error != std::errc()) index = -1;
  }
  if (index < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--device {}: give auto, host, or cuda:N with the number of a GPU", device));
  }
  return index;
}

EngineConfig config_of(const ProgramOptions& options) {
  EngineConfig config;
  config.store = {{options.store}};
  config.placement = parse_placement(options.placement);
  config.host_budget_bytes = options.host_memory_bytes;
  config.trainer_device_bytes = Mlp::device_bytes(options.shape);
  const MlpShape& shape = options.shape;
  config.run_identity = fmt::format("rows={} context={} width={} hidden={}", shape.rows,
                                    shape.context, shape.width, shape.hidden);
  config.numerics_fingerprint = "device_mlp";
  return config;
}

void steps(const ProgramOptions& options, Runtime& runtime, Device& device, Machine& machine,
           std::ostream& out) {
  const std::vector<std::uint8_t> text = read_text(options);
  const auto engine =
      Engine::open(mlp_model(options.shape), config_of(options), runtime, device, initialize_mlp);
  for (const std::string& line : engine->description()) out << line << '\n';
  Mlp mlp(*engine, device, machine, options.shape);
  for (std::uint64_t step = engine->generation(); step < options.steps; ++step) {
    const double loss = mlp.step(text, step, options.learning_rate);
    out << fmt::format("step {} loss {:.6f} bits {:016x}\n", step + 1, loss,
                       std::bit_cast<std::uint64_t>(loss))
        << std::flush;
  }
  engine->make_durable();
}

}  // namespace

void train(const ProgramOptions& options, std::ostream& out) {
  const auto runtime = Runtime::create({});
  if (const std::optional<int> gpu = gpu_of(options.device)) {
    const auto device = CudaDevice::create(
        runtime->reactor, {.index = *gpu, .capacity_bytes = options.device_memory_bytes});
    out << "device " << device->description() << '\n';
    const auto machine = make_machine(*device, kMiB);
    steps(options, *runtime, *device, *machine, out);
    return;
  }
  const auto device = HostDevice::create(runtime->reactor, options.device_memory_bytes);
  out << "device " << device->description() << '\n';
  const auto machine = make_machine(*device);
  steps(options, *runtime, *device, *machine, out);
}

}  // namespace ziggurat::device_mlp
