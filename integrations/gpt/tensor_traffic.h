// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_traffic.h: the bytes that a rank sends to those with which it divides
// every layer, in a step, before anything runs.
//
// V is the bytes of rows x width activations of a micro-batch. Each of T ranks sends for each
// micro-batch (tensor_passes.h says what for):
//
//   forward         (1 + 2 layers) 2 V (T-1)/T,   of the loss 12 bytes a row to each other rank
//   made again           layers 2 V (T-1)/T       where blocks keep their inputs only
//   backward        (1 + 2 layers) 2 V (T-1)/T
//
// With divided rows, forward and backward send as much, what is made again half as much more, and
// gradients of what is not divided are summed in fp32, once a step.
//
// Pure functions; any thread. Not counted: frames around payloads.
#pragma once

#include <cstdint>

#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::gpt {

struct TensorTraffic {
  std::uint64_t forward_bytes = 0;
  std::uint64_t again_bytes = 0;  ///< forward, repeated for backward
  std::uint64_t backward_bytes = 0;
  std::uint64_t shared_gradient_bytes = 0;
  std::uint64_t total() const noexcept {
    return forward_bytes + again_bytes + backward_bytes + shared_gradient_bytes;
  }
};

/// Bytes of one rank of model.part.ranks; 0 where there is one rank.
TensorTraffic tensor_traffic(const ModelConfig& model, const RunShape& shape);

}  // namespace ziggurat::gpt
