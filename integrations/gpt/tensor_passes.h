// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_passes.h: forward and backward of one micro-batch if tensor-parallel
// ranks divide every layer: the phases of block.h and head.h, and the ranks' exchanges between
// them.
//
// V is the bytes of rows x width activations. The ranks sum V (TensorRanks::sum_rows)
//
//   once for the embedding and once for the loss's gradient,
//   for each layer twice in forward and twice in backward,
//   and once if backward computes the activations again: attention's sum; the MLP's output is not
//   needed
//
// (Shoeybi et al. 2019, section 3). With sequence parallelism a sum leaves each rank its own rows,
// and rows are gathered where a divided layer begins (Korthikanti et al. 2022, section 4.2.2). That
// sends the same bytes, except that recomputation gathers both norms. The gathered rows of a norm
// are kept for backward, which costs the memory of one layer if layers are computed again.
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
  /// Computes what Block::forward() does.
  void forward(const Block::Forward& pass, double ComputeSeconds::*direction);
  /// Computes this part's logits of every row.
  void logits(ConstArray params, Array x);
  /// Computes the losses. With `gradient` it goes backward too, and x becomes the loss's gradient.
  void head(ConstArray params, const Batch& batch, float scale, Array x, float* gradient);
  /// Computes what Block::backward() does; sets pass.all_gradient itself.
  void backward(Block::Backward pass);
  void embed_backward(const Batch& batch, ConstArray dx, float* d_params);
  /// Sums the gradients of undivided parameters over the ranks, each of which has those of its own
  /// rows.
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
