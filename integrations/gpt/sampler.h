// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/sampler.h: draws text from the model, one byte at a time, in memory that the
// trainer lends.
//
// Each byte runs the window through every unit again. Nothing is cached between bytes, so a byte
// costs one pass of the parameters over the links to where they are kept.
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

/// The memory and the ranks for one sequence of up to `context` rows.
struct SamplerSpace {
  std::int64_t context;
  const TrainerSpace& trainer;
  Regions& regions;
  TensorRanks* tensor;  ///< null if this rank has the whole model; else all of them sample
};

/// Does what Trainer::sample() documents, on `threads` workers.
std::string sample(Engine& engine, std::size_t threads, const ModelConfig& model,
                   const SamplerSpace& space, const std::string& prompt,
                   const SampleOptions& options);

}  // namespace ziggurat::gpt
