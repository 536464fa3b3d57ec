// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/sampler.h: text from the model, one byte at a time, in memory that the trainer
// lends.
//
// Each byte runs the window through every unit again: nothing is cached between bytes, so a byte
// costs one pass of the parameters over whatever links they live behind.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/runtime/worker_pool.h"
#include "core/engine/engine.h"
#include "integrations/gpt/block.h"
#include "integrations/gpt/head.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::gpt {

/// For one sequence of up to `context` rows.
struct SamplerSpace {
  std::int64_t context;
  std::span<const WorkerScratch> scratch;
  Array x;
  Array y;
  const BlockActivations& activations;
  const HeadActivations& head;
};

/// Trainer::sample().
std::string sample(Engine& engine, WorkerPool& workers, const ModelConfig& model,
                   const SamplerSpace& space, const std::string& prompt,
                   const SampleOptions& options);

}  // namespace ziggurat::gpt
