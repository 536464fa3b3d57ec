// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/head.h: the two ends of the model, which share unit 0: bytes become vectors, and
// vectors become a loss over bytes.
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
  float* logits;   ///< rows x vocabulary, or this rank's columns of it
  Array d_logits;
  float* losses;                      ///< one a row
  kernels::RowStats* stats;           ///< of own rows
  kernels::LogitsPart* logits_parts;  ///< [rank][row], if ranks divide the vocabulary

  static HeadActivations carve(const ModelConfig& model, const RowShare& rows, Carver& carver);
};

/// Embeds bytes, and computes the loss and its gradient. If ranks divide the vocabulary (Shoeybi et
/// al. 2019, section 3), each rank has the vectors of some symbols. The ranks then sum the embedded
/// vectors and compute the loss from what each of them knows of a row; no rank ever has all logits.
/// The comments tell what the ranks do after each call.
class Head {
 public:
  Head(const ModelConfig& model, const RowShare& rows, std::size_t workers);

  static WideElements wide_scratch(const ModelConfig& model, const RowShare& rows);

  /// Computes x = wte[tokens] + wpe[position of the row].
  void embed(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
             std::int64_t context, Array x) const;
  /// Embeds in two steps if ranks divide the vocabulary: embed_tokens() fills all rows of
  /// `partial`, the ranks sum these, and add_positions() makes the own rows of x from `sum`.
  void embed_tokens(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
                    Array partial) const;
  void add_positions(Team& team, ConstArray params, std::int64_t context, ConstArray sum,
                     Array x) const;
  /// Adds the gradient of embed(). If ranks divide the vocabulary, the positions' gradient is of
  /// own rows (`dx`), and that of the symbols' vectors of all rows (`all_dx`).
  void embed_backward(Team& team, std::span<const std::uint8_t> tokens, std::int64_t context,
                      ConstArray dx, ConstArray all_dx, float* d_params) const;

  /// Computes logits = ln_f(x) wte^T in two steps: after norm() the ranks gather ln_f of all rows;
  /// after logits() they exchange nothing.
  void norm(Team& team, ConstArray params, ConstArray x, const HeadActivations& activations) const;
  void logits(Team& team, std::span<const WorkerScratch> scratch, ConstArray params,
              const HeadActivations& activations) const;
  /// Fills this rank's logits_parts if ranks divide the vocabulary; then the ranks gather all of
  /// them.
  void softmax_part(Team& team, std::span<const std::uint8_t> targets,
                    const HeadActivations& activations) const;
  /// Computes each row's loss and, unless `scale` is 0, the gradient of `scale` times their sum.
  void loss(Team& team, std::span<const std::uint8_t> targets, float scale,
            const HeadActivations& activations) const;
  /// Adds unit 0's gradient and turns x into d loss / d x: call logits_backward(), then
  /// norm_backward(). If ranks divide the vocabulary, they sum d_normal between the two calls.
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
