// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/host_machine.cc: the layers' host twins.
#include <algorithm>

#include "integrations/device_mlp/machine.h"

namespace ziggurat::device_mlp {
namespace {

class HostMachine final : public Machine {
 public:
  explicit HostMachine(std::uint64_t seed) : seed_(seed) {}

  void run(const Each<Embed>& program) override { run_twin(program, ++seed_); }
  void run(const Each<Linear>& program) override { run_twin(program, ++seed_); }
  void run(const Each<Softmax>& program) override { run_twin(program, ++seed_); }
  void run(const Each<LinearGradient>& program) override { run_twin(program, ++seed_); }
  void run(const Each<LinearBackward>& program) override { run_twin(program, ++seed_); }
  void run(const Each<EmbedGradient>& program) override { run_twin(program, ++seed_); }
  void finish() override {}
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) override {
    std::ranges::copy(bytes, HostDevice::view(to).begin());
  }
  void read(std::span<std::byte> to, DeviceSpan<const std::byte> bytes) override {
    std::ranges::copy(HostDevice::view(bytes), to.begin());
  }

 private:
  std::uint64_t seed_;
};

}  // namespace

std::unique_ptr<Machine> make_machine(HostDevice&, std::uint64_t seed) {
  return std::make_unique<HostMachine>(seed);
}

}  // namespace ziggurat::device_mlp
