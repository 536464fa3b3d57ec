// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_traffic.cc: counts the exchanges of a micro-batch.
#include "integrations/gpt/tensor_traffic.h"

#include "integrations/gpt/kernels.h"

namespace ziggurat::gpt {

TensorTraffic tensor_traffic(const ModelConfig& model, const RunShape& shape) {
  const auto ranks = static_cast<std::uint64_t>(model.part.ranks);
  if (ranks == 1) return {};
  const auto layers = static_cast<std::uint64_t>(model.layers);
  const auto rows = static_cast<std::uint64_t>(shape.rows());
  const auto width = static_cast<std::uint64_t>(model.width);
  const auto micro_batches = static_cast<std::uint64_t>(shape.accumulate);
  // The bytes of summing rows to their owners, or of gathering rows from them; a sum for all ranks
  // is both.
  const std::uint64_t once = rows * width * size_bytes(model.dtype) / ranks * (ranks - 1);
  const std::uint64_t loss = rows * sizeof(kernels::LogitsPart) * (ranks - 1);

  TensorTraffic traffic;
  traffic.forward_bytes = micro_batches * ((2 + 4 * layers) * once + loss);
  traffic.backward_bytes = micro_batches * (2 + 4 * layers) * once;
  const bool again = shape.checkpointing == ActivationCheckpointing::kBlock;
  if (again)
    traffic.again_bytes = micro_batches * layers * (shape.sequence_parallel ? 3 : 2) * once;
  if (!shape.sequence_parallel) return traffic;
  // Parameters that ranks do not divide: wpe and ln_f, and of each block two norms and two biases.
  const std::uint64_t embedding = (static_cast<std::uint64_t>(model.context_max) + 2) * width;
  const std::uint64_t shared = embedding + layers * 6 * width;
  traffic.shared_gradient_bytes = 2 * shared * sizeof(float) / ranks * (ranks - 1);
  return traffic;
}

}  // namespace ziggurat::gpt
