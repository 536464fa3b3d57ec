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
#include "integrations/gpt/workspace.h"

namespace ziggurat::gpt {

struct HeadActivations {
  Array normal;    ///< ln_f's output
  Array d_normal;  ///< its gradient
  float* logits;   ///< rows x vocabulary
  Array d_logits;
  float* losses;  ///< one a row
  kernels::RowStats* stats;

  static HeadActivations carve(const ModelConfig& model, std::int64_t rows, Carver& carver);
};

class Head {
 public:
  Head(const ModelConfig& model, std::int64_t rows, std::size_t workers);

  static WideElements wide_scratch(const ModelConfig& model, std::int64_t rows);

  /// x = wte[tokens] + wpe[position of the row].
  void embed(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
             std::int64_t context, Array x) const;
  /// Adds embed's gradient.
  void embed_backward(Team& team, std::span<const std::uint8_t> tokens, std::int64_t context,
                      ConstArray dx, float* d_params) const;

  /// logits = ln_f(x) wte^T.
  void logits(Team& team, std::span<const WorkerScratch> scratch, ConstArray params, ConstArray x,
              const HeadActivations& activations) const;
  /// Each row's loss, and the gradient of `scale` times their sum unless scale is 0.
  void loss(Team& team, std::span<const std::uint8_t> targets, float scale,
            const HeadActivations& activations) const;
  /// After both: x becomes d loss / d x, and the gradients of unit 0 are added to.
  void backward(Team& team, std::span<const WorkerScratch> scratch, ConstArray params, Array x,
                const HeadActivations& activations, float* d_params) const;

 private:
  ModelConfig model_;
  std::int64_t rows_;
  EmbeddingLayout at_;
  TiledMatmul logits_, d_normal_, d_wte_;
};

}  // namespace ziggurat::gpt
