// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_traffic.h: the bytes that a rank sends in a step to the ranks with which
// it divides every layer, computed before anything runs.
//
// V is the bytes of rows x width activations of a micro-batch. Each of T ranks sends for each
// micro-batch (tensor_passes.h says what for):
//
//   forward         (1 + 2 layers) 2 V (T-1)/T,   and 12 bytes a row of the loss to each other rank
//   made again           layers 2 V (T-1)/T       if blocks keep only their inputs
//   backward        (1 + 2 layers) 2 V (T-1)/T
//
// If ranks divide the rows, forward and backward send as much, what is made again takes half as
// much more, and gradients of undivided parameters are summed in fp32 once a step.
//
// Pure functions, for any thread. The frames around payloads are not counted.
#pragma once

#include <cstdint>

#include "integrations/gpt/model.h"
#include "integrations/gpt/trainer.h"

namespace ziggurat::gpt {

struct TensorTraffic {
  std::uint64_t forward_bytes = 0;
  std::uint64_t again_bytes = 0;  ///< bytes of the forward that backward repeats
  std::uint64_t backward_bytes = 0;
  std::uint64_t shared_gradient_bytes = 0;
  std::uint64_t total() const noexcept {
    return forward_bytes + again_bytes + backward_bytes + shared_gradient_bytes;
  }
};

/// Returns the bytes that one rank of model.part.ranks sends; 0 if there is one rank.
TensorTraffic tensor_traffic(const ModelConfig& model, const RunShape& shape);

}  // namespace ziggurat::gpt
