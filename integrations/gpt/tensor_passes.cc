// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/tensor_passes.cc: runs a phase, exchanges its results, runs the next phase.
#include "integrations/gpt/tensor_passes.h"

#include <algorithm>

namespace ziggurat::gpt {
namespace {

constexpr auto kForward = &ComputeSeconds::forward;
constexpr auto kBackward = &ComputeSeconds::backward;

}  // namespace

TensorPasses::TensorPasses(const ModelConfig& model, const RunShape& shape, const Block& block,
                           const Head& head, const TrainerSpace& space, Regions& regions,
                           TensorRanks& ranks)
    : model_(model),
      context_(shape.context),
      rows_(shape.row_share(model)),
      block_(block),
      head_(head),
      space_(space),
      regions_(regions),
      ranks_(ranks) {
  const ModelSpec spec = make_spec(model);
  embedding_shared_ = shared_runs(spec.units[kEmbeddingUnit]);
  block_shared_ = shared_runs(spec.units[block_unit(0)]);
}

void TensorPasses::embed(ConstArray params, const Batch& batch, Array x) {
  const Array partial = space_.d_rows;
  regions_.run("embed", kForward,
               [&](Team& team) { head_.embed_tokens(team, params, batch.inputs, partial); });
  ranks_.sum_rows(partial, rows_, model_.width);
  regions_.run("embed", kForward,
               [&](Team& team) { head_.add_positions(team, params, context_, partial, x); });
}

void TensorPasses::forward(const Block::Forward& pass, double ComputeSeconds::*direction) {
  const auto region = [&](const std::function<void(Team&)>& phase) {
    regions_.run("forward", direction, phase);
  };
  region([&](Team& team) { block_.norm_1(team, pass); });
  ranks_.gather_rows(pass.activations.ln_1, rows_, model_.width);
  region([&](Team& team) { block_.attend(team, space_.scratch, pass); });
  ranks_.sum_rows(pass.partial, rows_, model_.width);
  region([&](Team& team) { block_.norm_2(team, pass); });
  ranks_.gather_rows(pass.activations.ln_2, rows_, model_.width);
  region([&](Team& team) { block_.mlp(team, space_.scratch, pass); });
  if (!pass.y) return;
  ranks_.sum_rows(pass.partial, rows_, model_.width);
  region([&](Team& team) { block_.add_mlp(team, pass); });
}

void TensorPasses::logits(ConstArray params, Array x) {
  const HeadActivations& a = space_.head;
  regions_.run("head", kForward, [&](Team& team) { head_.norm(team, params, x, a); });
  ranks_.gather_rows(a.normal, rows_, model_.width);
  regions_.run("head", kForward,
               [&](Team& team) { head_.logits(team, space_.scratch, params, a); });
}

void TensorPasses::head(ConstArray params, const Batch& batch, float scale, Array x,
                        float* gradient) {
  const HeadActivations& a = space_.head;
  logits(params, x);
  regions_.run("head", kForward, [&](Team& team) { head_.softmax_part(team, batch.targets, a); });
  const auto parts = static_cast<std::size_t>(model_.part.ranks * rows_.all);
  ranks_.gather(std::as_writable_bytes(std::span(a.logits_parts, parts)));
  regions_.run("head", kForward, [&](Team& team) {
    head_.loss(team, batch.targets, scale, a);
    if (gradient) head_.logits_backward(team, space_.scratch, params, a, gradient);
  });
  if (!gradient) return;
  ranks_.sum_rows(a.d_normal, rows_, model_.width);
  regions_.run("head", kForward,
               [&](Team& team) { head_.norm_backward(team, params, x, a, gradient); });
}

/// Returns all rows of a gradient of which each rank has its own rows.
ConstArray TensorPasses::all_rows(ConstArray own) {
  if (rows_.own == rows_.all) return own;
  ranks_.gather_rows(own, space_.gathered, rows_, model_.width);
  return space_.gathered;
}

void TensorPasses::backward(Block::Backward pass) {
  const auto region = [&](const std::function<void(Team&)>& phase) {
    regions_.run("backward", kBackward, phase);
  };
  pass.all_gradient = all_rows(pass.gradient);
  region([&](Team& team) { block_.mlp_backward(team, space_.scratch, pass); });
  ranks_.sum_rows(pass.d_rows, rows_, model_.width);
  region([&](Team& team) { block_.norm_2_backward(team, pass); });
  pass.all_gradient = all_rows(pass.gradient);
  region([&](Team& team) { block_.attention_backward(team, space_.scratch, pass); });
  ranks_.sum_rows(pass.d_rows, rows_, model_.width);
  region([&](Team& team) { block_.norm_1_backward(team, pass); });
}

void TensorPasses::embed_backward(const Batch& batch, ConstArray dx, float* d_params) {
  const ConstArray all = all_rows(dx);
  regions_.run("embed backward", kBackward, [&](Team& team) {
    head_.embed_backward(team, batch.inputs, context_, dx, all, d_params);
  });
}

void TensorPasses::sum_shared(UnitId unit, std::span<float> gradient) {
  if (rows_.own == rows_.all) return;
  const auto& runs = unit == kEmbeddingUnit ? embedding_shared_ : block_shared_;
  if (runs.size() == 1) {
    ranks_.sum(gradient.subspan(runs[0].begin, runs[0].count()));
    return;
  }
  float* end = space_.shared;
  for (const ElementRun& run : runs) end = std::copy_n(&gradient[run.begin], run.count(), end);
  ranks_.sum({space_.shared, end});
  const float* from = space_.shared;
  for (const ElementRun& run : runs) {
    std::copy_n(from, run.count(), &gradient[run.begin]);
    from += run.count();
  }
}

}  // namespace ziggurat::gpt
