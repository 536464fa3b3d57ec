// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/block.h: one transformer block (pre-LN attention and MLP) of one micro-batch,
// forward and backward.
//
// A pass consists of phases of a team region: products tile by tile, whose elementwise tail is
// applied while a tile is in cache, then the row-wise kernels. The residual stream has the model's
// type.
//
// If tensor-parallel ranks divide the block, each has some heads and some hidden columns. Each
// computes its part of attention's and the MLP's output, and the ranks add the parts up (Shoeybi et
// al. 2019, section 3). In backward they add up the gradients of the inputs in the same way. Such a
// sum ends a phase.
#pragma once

#include <cstdint>
#include <span>

#include "base/runtime/worker_pool.h"
#include "integrations/gpt/attention.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/row_share.h"
#include "integrations/gpt/workspace.h"

namespace ziggurat::gpt {

/// What forward keeps for backward: 15 x rows x width elements and statistics, or less if ranks
/// divide the block.
struct BlockActivations {
  // Over all rows.
  Array ln_1, qkv, attention, ln_2, before_gelu, gelu;
  kernels::RowStats* softmax_stats;
  // Over the rank's own rows.
  Array middle;
  kernels::RowStats *ln_1_stats, *ln_2_stats;

  static BlockActivations carve(const ModelConfig& model, const RowShare& rows, Carver& carver);
};

class Block {
 public:
  struct Shape {
    std::int64_t batch, context;
    RowShare rows = RowShare::whole(batch * context);
  };
  Block(const ModelConfig& model, const Shape& shape, std::size_t workers);

  static WideElements wide_scratch(const ModelConfig& model, const Shape& shape);

  enum class Keep : std::uint8_t {
    kNothing,  ///< keeps nothing: only the output is wanted
    kAll,      ///< keeps all for backward; without `y`, skips what only `y` needs
  };
  struct Forward {
    ConstArray params;
    ConstArray x;  ///< own rows x width
    const BlockActivations& activations;
    Keep keep;
    Array y;             ///< own rows x width; may be null
    Array partial = {};  ///< rows x width: what the ranks add up if they divide the block
  };
  /// Computes y = block(x), for a block that this rank has whole. All workers of the team call it
  /// with the same arguments. If ranks divide the block, the phases below are called instead; the
  /// comment beside each tells what the ranks exchange after it.
  void forward(Team& team, std::span<const WorkerScratch> scratch, const Forward& pass) const;
  void norm_1(Team& team, const Forward& pass) const;  ///< then: gather ln_1 of all rows
  void attend(Team& team, std::span<const WorkerScratch> scratch,
              const Forward& pass) const;              ///< then: sum `partial` into own rows
  void norm_2(Team& team, const Forward& pass) const;  ///< then: gather ln_2 of all rows
  void mlp(Team& team, std::span<const WorkerScratch> scratch,
           const Forward& pass) const;                  ///< then: sum `partial` into own rows
  void add_mlp(Team& team, const Forward& pass) const;  ///< then: nothing

  struct Backward {
    ConstArray params;
    ConstArray x;
    const BlockActivations& activations;  ///< what forward with Keep::kAll left; overwritten
    Array gradient;                       ///< own rows; d loss / d y in, d loss / d x out
    ConstArray all_gradient;              ///< all rows; may be `gradient` if this rank has all rows
    Array d_rows;                         ///< scratch, rows x width
    /// the parameters' gradients, to which backward adds sums over rows: own rows for undivided
    /// parameters, all rows for divided ones
    float* d_params;
  };
  void backward(Team& team, std::span<const WorkerScratch> scratch, const Backward& pass) const;
  void mlp_backward(Team& team, std::span<const WorkerScratch> scratch,
                    const Backward& pass) const;                 ///< then: sum d_rows into own rows
  void norm_2_backward(Team& team, const Backward& pass) const;  ///< then: gather all_gradient
  void attention_backward(Team& team, std::span<const WorkerScratch> scratch,
                          const Backward& pass) const;           ///< then: sum d_rows into own rows
  void norm_1_backward(Team& team, const Backward& pass) const;  ///< then: nothing

 private:
  struct Norm {
    std::int64_t weight, bias;
    const kernels::RowStats* stats;
  };
  void norm_backward(Team& team, const Norm& norm, ConstArray in, const Backward& pass) const;
  HeadView head(const BlockActivations& activations, std::size_t index) const;
  std::int64_t head_begin(std::size_t index) const;
  bool divided() const noexcept { return model_.part.ranks > 1; }

  ModelConfig model_;
  Shape shape_;
  RowShare rows_;
  BlockLayout at_;
  Attention attention_;
  TiledMatmul qkv_, attention_projection_, fc_, mlp_projection_;
  TiledMatmul d_qkv_input_, d_attention_projection_input_, d_fc_input_, d_mlp_projection_input_;
  TiledMatmul d_qkv_weight_, d_attention_projection_weight_, d_fc_weight_, d_mlp_projection_weight_;
};

}  // namespace ziggurat::gpt
