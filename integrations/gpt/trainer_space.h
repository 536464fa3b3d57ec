// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/trainer_space.h: everything that the trainer keeps on the device, as views of
// one buffer.
//
// GPT-2 small with 4 micro-batches of 2 x 256, checkpointing and 2 workers takes 55.1 MiB, of which
// 39 are block inputs.
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
  /// A block's input, own rows x width, by [layer][micro-batch]; the last layer is the head's
  /// input. Backward turns the last into the gradient that runs down through the blocks.
  std::vector<std::vector<Array>> stream;
  /// What backward needs, by [layer][micro-batch]; with checkpointing all entries share one memory.
  std::vector<std::vector<BlockActivations>> activations;
  HeadActivations head;
  Array d_rows;  ///< rows x width; also what the ranks add up if they divide layers
  // With sequence parallelism:
  Array gathered;           ///< rows x width
  float* shared = nullptr;  ///< a block's gradient of undivided parameters

  static TrainerSpace carve(const ModelConfig& model, const RunShape& shape, std::size_t threads,
                            Carver& carver);
};

}  // namespace ziggurat::gpt
