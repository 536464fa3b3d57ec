// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/attention.h: causal self-attention of one head, forward and backward.
//
// Takes queries in blocks of 128, against the keys up to the block's end. So most of what lies
// above the diagonal is not computed, and no matrix is quadratic in the context. Backward computes
// the probabilities again from the scores.
#pragma once

#include <cstdint>
#include <vector>

#include "integrations/gpt/array.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/workspace.h"

namespace ziggurat::gpt {

/// Where the rows of one head of one sequence start. Queries, keys and values lie in one matrix,
/// which is three times as wide as all heads of this rank.
struct HeadView {
  Array queries;
  Array keys;
  Array values;
  kernels::RowStats* stats;  ///< the softmax's statistics, one pair for each row
};

class Attention {
 public:
  Attention(const ModelConfig& model, std::int64_t context, std::size_t workers);

  static void carve(const ModelConfig& model, std::int64_t context, Carver& carver,
                    WorkerScratch& scratch);
  static WideElements wide_scratch(const ModelConfig& model, std::int64_t context);

  /// Computes out = softmax(q k^T / sqrt(head width)) v. A row of `out` has all heads of this rank.
  void forward(std::size_t worker, const HeadView& head, Array out,
               const WorkerScratch& scratch) const;
  /// Replaces queries, keys and values by their gradients. `out` is forward's output, and `d_out`
  /// the gradient of that.
  void backward(std::size_t worker, const HeadView& head, ConstArray out, ConstArray d_out,
                const WorkerScratch& scratch) const;

 private:
  struct QueryBlock {
    std::int64_t first, rows;  ///< the block sees keys [0, first + rows)
    Matmul scores, out, d_probabilities, d_queries, d_keys, d_values;
  };

  kernels::CausalRows causal(const QueryBlock& block) const;

  std::int64_t context_, width_, head_width_, leading_;
  std::vector<QueryBlock> blocks_;
};

}  // namespace ziggurat::gpt
