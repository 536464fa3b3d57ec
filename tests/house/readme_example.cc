// SPDX-License-Identifier: Apache-2.0
// tests/house/readme_example.cc: README's program, compiled and run so that it stays true. Twice:
// the second run resumes.

// README begins
#include <algorithm>
#include <cstdio>

#include "base/bytes.h"
#include "core/engine/engine.h"
#include "tiers/device/host_device.h"

using namespace ziggurat;

int main(int argc, char** argv) {
  const ModelSpec model{
      "two layers", {{"first", {{"weight", {256, 256}}}}, {"second", {{"weight", {256, 256}}}}}};
  EngineConfig config;  // parameters and gradients in host memory, optimizer state in the store
  config.store = {{argc > 1 ? argv[1] : "store"}};
  config.host_budget_bytes = 32 * kMiB;

  const auto runtime = Runtime::create({});
  const auto device = HostDevice::create(runtime->reactor, 8 * kMiB);
  const auto engine = Engine::open(
      model, config, *runtime, *device,
      [](UnitId, std::uint64_t, std::span<float> values) { std::ranges::fill(values, 0.5F); });

  for (int step = 0; step < 10; ++step) {
    for (UnitId unit = 0; unit < 2; ++unit) {  // forward
      engine->acquire(unit);                   // its bf16 parameters are on the device now
      engine->release(unit);
    }
    for (UnitId unit = 2; unit-- > 0;) {  // backward, of the loss sum(w * w) / 2
      const auto params = HostDevice::view(engine->acquire(unit)).as<bf16>();
      const auto gradient = HostDevice::view(engine->gradient(unit));
      std::ranges::transform(params, gradient.begin(), bf16_to_float);
      engine->release(unit);
      engine->finish_gradient(unit);
    }
    const StepResult result = engine->step({.learning_rate = 0.01F, .blob = {}});
    std::printf("generation %d: gradient norm %.3f\n", static_cast<int>(result.generation),
                result.grad_norm);
  }
  engine->make_durable();  // kill -9 before this line, run again: it goes on from a finished step
}
// README ends
