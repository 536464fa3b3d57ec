// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/trainer_space.h: everything the trainer keeps on the device, as views of one
// buffer.
//
// GPT-2 small, 4 micro-batches of 2 x 256, checkpointing, 2 workers: 55.1 MiB, of which 39 are
// block inputs.
#pragma once

#include <cstddef>
#include <vector>

#include "integrations/gpt/block.h"
#include "integrations/gpt/head.h"
#include "integrations/gpt/trainer.h"
#include "integrations/gpt/workspace.h"

namespace ziggurat::gpt {

struct TrainerSpace {
  std::vector<WorkerScratch> scratch;  ///< one a worker
  /// [layer][micro-batch]: a block's input, own rows x width; the last layer is the head's input.
  /// Backward turns that into the gradient that runs down through the blocks.
  std::vector<std::vector<Array>> stream;
  /// The same indices; with checkpointing all are one
  std::vector<std::vector<BlockActivations>> activations;
  HeadActivations head;
  Array d_rows;  ///< rows x width; where ranks divide layers, what they add up too
  // With sequence parallelism:
  Array gathered;           ///< rows x width
  float* shared = nullptr;  ///< a block's gradient of what is not divided

  static TrainerSpace carve(const ModelConfig& model, const RunShape& shape, std::size_t threads,
                            Carver& carver);
};

}  // namespace ziggurat::gpt
