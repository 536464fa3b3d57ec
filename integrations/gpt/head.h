// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/head.h: both ends of the model, which share unit 0: bytes to vectors, and
// vectors to a loss over bytes.
#pragma once

#include <cstdint>
#include <span>

#include "base/runtime/worker_pool.h"
#include "integrations/gpt/kernels.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/row_share.h"
#include "integrations/gpt/workspace.h"

namespace ziggurat::gpt {

struct HeadActivations {
  Array normal;    ///< ln_f's output, of all rows
  Array d_normal;  ///< its gradient
  float* logits;   ///< rows x vocabulary, or this rank's run of it
  Array d_logits;
  float* losses;                      ///< one a row
  kernels::RowStats* stats;           ///< of own rows
  kernels::LogitsPart* logits_parts;  ///< where ranks divide the vocabulary: [rank][row]

  static HeadActivations carve(const ModelConfig& model, const RowShare& rows, Carver& carver);
};

/// Where ranks divide the vocabulary (Shoeybi et al. 2019, section 3), each has the vectors of some
/// symbols: what is embedded is summed over ranks, the loss is made from what each knows of a row,
/// and no rank ever has all logits. Comments say what ranks do after each call.
class Head {
 public:
  Head(const ModelConfig& model, const RowShare& rows, std::size_t workers);

  static WideElements wide_scratch(const ModelConfig& model, const RowShare& rows);

  /// x = wte[tokens] + wpe[position of the row].
  void embed(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
             std::int64_t context, Array x) const;
  /// In two steps, where ranks divide the vocabulary: all rows of `partial`, then the sum of these;
  /// own rows of x from it.
  void embed_tokens(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
                    Array partial) const;
  void add_positions(Team& team, ConstArray params, std::int64_t context, ConstArray sum,
                     Array x) const;
  /// Adds embed's gradient: of own rows, and for the vectors of symbols of all rows.
  void embed_backward(Team& team, std::span<const std::uint8_t> tokens, std::int64_t context,
                      ConstArray dx, ConstArray all_dx, float* d_params) const;

  /// logits = ln_f(x) wte^T, in two steps: then ln_f of all rows; nothing.
  void norm(Team& team, ConstArray params, ConstArray x, const HeadActivations& activations) const;
  void logits(Team& team, std::span<const WorkerScratch> scratch, ConstArray params,
              const HeadActivations& activations) const;
  /// Where ranks divide the vocabulary: this rank's of logits_parts, then all ranks'.
  void softmax_part(Team& team, std::span<const std::uint8_t> targets,
                    const HeadActivations& activations) const;
  /// Each row's loss, and the gradient of `scale` times their sum unless scale is 0.
  void loss(Team& team, std::span<const std::uint8_t> targets, float scale,
            const HeadActivations& activations) const;
  /// Call logits_backward(), then norm_backward(). Together they add unit 0's gradient and turn x
  /// into d loss / d x. Where ranks divide the vocabulary, d_normal is summed over them in between.
  void logits_backward(Team& team, std::span<const WorkerScratch> scratch, ConstArray params,
                       const HeadActivations& activations, float* d_params) const;
  void norm_backward(Team& team, ConstArray params, Array x, const HeadActivations& activations,
                     float* d_params) const;

 private:
  bool divided() const noexcept { return model_.part.ranks > 1; }
  kernels::TokenRange tokens() const noexcept {
    return {model_.first_token(), model_.part_vocabulary()};
  }

  ModelConfig model_;
  RowShare rows_;
  EmbeddingLayout at_;
  TiledMatmul logits_, d_normal_, d_wte_;
};

}  // namespace ziggurat::gpt
