// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_passes.h: forward and backward of one micro-batch where tensor-parallel
// ranks divide every layer: the phases of block.h and head.h, and between them what ranks exchange.
//
// V being the bytes of rows x width activations, ranks sum V (TensorRanks::sum_rows)
//
//   once for the embedding and once for the loss's gradient,
//   and for each layer twice forward, twice backward,
//   and once where backward makes the activations again: of attention; the MLP's output is not
//   needed
//
// (Shoeybi et al. 2019, section 3). With sequence parallelism a sum ends in own rows, and rows are
// gathered where a divided layer begins (Korthikanti et al. 2022, section 4.2.2): the same bytes,
// but for recomputation, which gathers both norms. What a norm's gathering gave is kept for
// backward: it costs memory of one layer where layers are made again.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "integrations/gpt/block.h"
#include "integrations/gpt/head.h"
#include "integrations/gpt/regions.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/text.h"
#include "integrations/gpt/trainer_space.h"

namespace ziggurat::gpt {

class TensorPasses {
 public:
  TensorPasses(const ModelConfig& model, const RunShape& shape, const Block& block,
               const Head& head, const TrainerSpace& space, Regions& regions, TensorRanks& ranks);

  void embed(ConstArray params, const Batch& batch, Array x);
  /// As Block::forward().
  void forward(const Block::Forward& pass, double ComputeSeconds::*direction);
  /// This part's, of every row.
  void logits(ConstArray params, Array x);
  /// Losses; with `gradient` backward too: x becomes the loss's gradient.
  void head(ConstArray params, const Batch& batch, float scale, Array x, float* gradient);
  /// As Block::backward(); pass.all_gradient is this function's own.
  void backward(Block::Backward pass);
  void embed_backward(const Batch& batch, ConstArray dx, float* d_params);
  /// Sums over ranks the gradients of parameters that are not divided: each rank has its own rows'.
  void sum_shared(UnitId unit, std::span<float> gradient);

 private:
  ConstArray all_rows(ConstArray own);

  ModelConfig model_;
  std::int64_t context_;
  RowShare rows_;
  const Block& block_;
  const Head& head_;
  const TrainerSpace& space_;
  Regions& regions_;
  TensorRanks& ranks_;
  std::vector<ElementRun> embedding_shared_, block_shared_;
};

}  // namespace ziggurat::gpt
