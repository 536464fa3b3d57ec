// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/host_machine.cc: runs the layers' rules on the CPU, element by element.
#include <algorithm>

#include "base/bytes.h"
#include "integrations/device_mlp/machine.h"

namespace ziggurat::device_mlp {
namespace {

template <class Rule>
void run_each(const Each<Rule>& program) {
  for (std::uint64_t i = 0; i < program.count; ++i) program.rule(i);
}

class HostMachine final : public Machine {
 public:
  void run(const Each<Embed>& program) override { run_each(program); }
  void run(const Each<Linear>& program) override { run_each(program); }
  void run(const Each<Softmax>& program) override { run_each(program); }
  void run(const Each<LinearGradient>& program) override { run_each(program); }
  void run(const Each<LinearBackward>& program) override { run_each(program); }
  void run(const Each<EmbedGradient>& program) override { run_each(program); }
  StreamRef& stream() override { return host_; }
  void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) override {
    copy_bytes(bytes, HostDevice::view(to));
  }
  void read(std::span<std::byte> to, DeviceSpan<const std::byte> bytes) override {
    copy_bytes(HostDevice::view(bytes), to);
  }

 private:
  Host host_;
};

}  // namespace

std::unique_ptr<Machine> make_machine(HostDevice&) { return std::make_unique<HostMachine>(); }

}  // namespace ziggurat::device_mlp
