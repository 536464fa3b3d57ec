// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_fixture.h: a small trainer over an engine in RAM, for the gpt tests.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/runtime/reactor.h"
#include "base/runtime/worker_pool.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/random.h"
#include "integrations/gpt/trainer.h"
#include "tests/support/ram_engine.h"
#include "tiers/device/host_device.h"

namespace ziggurat::gpt {

/// Bytes that look like text: a few symbols, some order.
inline Batch make_batch(const RunShape& shape, std::uint64_t seed) {
  Batch batch;
  std::uint64_t state = mix64(seed);
  std::uint8_t last = 'a';
  for (std::int64_t i = 0; i < shape.rows(); ++i) {
    state = mix64(state);
    const auto next = static_cast<std::uint8_t>('a' + (last - 'a' + state % 5) % 26);
    batch.inputs.push_back(last);
    batch.targets.push_back(next);
    last = next;
  }
  return batch;
}

struct Training {
  Training(const ModelConfig& model_config, const RunShape& run_shape, std::size_t threads,
           std::uint64_t seed = 1)
      : model(model_config),
        shape(run_shape),
        workers({.threads = threads, .cpus = {}, .trace = nullptr}),
        device(
            HostDevice::create(reactor, Trainer::workspace_bytes(model, shape, threads) + 65536)),
        engine(make_spec(model), {}, 1.0F, make_initializer(model, seed)),
        trainer(engine, *device, workers, model, shape) {}

  std::vector<Batch> batches(std::uint64_t step) const {
    std::vector<Batch> result;
    for (std::int64_t k = 0; k < shape.accumulate; ++k) {
      result.push_back(make_batch(shape, step * 1000 + static_cast<std::uint64_t>(k)));
    }
    return result;
  }
  double step(std::uint64_t number, float learning_rate = 1e-3F) {
    const double loss = trainer.forward_backward(batches(number));
    engine.step({.learning_rate = learning_rate, .blob = {}});
    return loss;
  }

  ModelConfig model;
  RunShape shape;
  Reactor reactor;
  WorkerPool workers;
  std::unique_ptr<HostDevice> device;
  testing::RamEngine engine;
  Trainer trainer;
};

}  // namespace ziggurat::gpt
