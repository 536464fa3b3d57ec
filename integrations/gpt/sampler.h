// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/sampler.h: text from the model, one byte at a time, in memory that the trainer
// lends.
//
// Each byte runs the window through every unit again: nothing is cached between bytes, so a byte
// costs one pass of the parameters over whatever links they live behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/engine/engine.h"
#include "integrations/gpt/regions.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/trainer.h"
#include "integrations/gpt/trainer_space.h"

namespace ziggurat::gpt {

/// For one sequence of up to `context` rows.
struct SamplerSpace {
  std::int64_t context;
  const TrainerSpace& trainer;
  Regions& regions;
  TensorRanks* tensor;  ///< null where the model is whole; else each of them samples
};

/// Trainer::sample(), on as many workers as `threads`.
std::string sample(Engine& engine, std::size_t threads, const ModelConfig& model,
                   const SamplerSpace& space, const std::string& prompt,
                   const SampleOptions& options);

}  // namespace ziggurat::gpt
