// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/block.h: one transformer block (pre-LN attention and MLP) of one micro-batch,
// forward and backward.
//
// Phases of a team region: products tile by tile with their elementwise tail applied while the tile
// is in cache, then the row-wise kernels. The residual stream has the model's type.
#pragma once

#include <cstdint>
#include <span>

#include "base/runtime/worker_pool.h"
#include "integrations/gpt/attention.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/workspace.h"

namespace ziggurat::gpt {

/// What forward leaves for backward: 15 x rows x width elements, and statistics.
struct BlockActivations {
  Array ln_1, qkv, attention, middle, ln_2, before_gelu, gelu;
  kernels::RowStats *ln_1_stats, *softmax_stats, *ln_2_stats;

  static BlockActivations carve(const ModelConfig& model, std::int64_t rows, Carver& carver);
};

class Block {
 public:
  struct Shape {
    std::int64_t batch, context;
  };
  Block(const ModelConfig& model, const Shape& shape, std::size_t workers);

  static WideElements wide_scratch(const ModelConfig& model, const Shape& shape);

  enum class Keep : std::uint8_t {
    kNothing,  ///< for the output alone
    kAll,      ///< for backward; without an output, what only the output needs is left out
  };
  /// y = block(x), both rows x width. All workers of the team call it, with the same arguments.
  void forward(Team& team, std::span<const WorkerScratch> scratch, ConstArray params, ConstArray x,
               const BlockActivations& activations, Keep keep, Array y) const;

  struct Backward {
    ConstArray params;
    ConstArray x;
    const BlockActivations& activations;  ///< as forward with Keep::kAll left them; consumed
    Array gradient;                       ///< in: d loss / d y; out: d loss / d x
    Array d_rows;                         ///< scratch, rows x width
    float* d_params;                      ///< added to
  };
  void backward(Team& team, std::span<const WorkerScratch> scratch, const Backward& pass) const;

 private:
  HeadView head(const BlockActivations& activations, std::size_t index) const;

  ModelConfig model_;
  Shape shape_;
  std::int64_t rows_;
  BlockLayout at_;
  Attention attention_;
  TiledMatmul qkv_, attention_projection_, fc_, mlp_projection_;
  TiledMatmul d_qkv_input_, d_attention_projection_input_, d_fc_input_, d_mlp_projection_input_;
  TiledMatmul d_qkv_weight_, d_attention_projection_weight_, d_fc_weight_, d_mlp_projection_weight_;
};

}  // namespace ziggurat::gpt
