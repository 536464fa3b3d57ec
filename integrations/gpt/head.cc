// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/head.cc: embedding, final norm, tied output layer and loss.
#include "integrations/gpt/head.h"

#include <algorithm>

#include "integrations/gpt/phases.h"

namespace ziggurat::gpt {
namespace {

MatmulShape logits_shape(const ModelConfig& model, std::int64_t rows) {
  return {.m = rows,
          .k = model.width,
          .n = model.vocabulary,
          .a = {model.width, false},
          .b = {model.width, true},
          .leading_c = model.vocabulary,
          .whole_rows = true,
          .dtype = model.dtype};
}
MatmulShape d_normal_shape(const ModelConfig& model, std::int64_t rows) {
  return {.m = rows,
          .k = model.vocabulary,
          .n = model.width,
          .a = {model.vocabulary, false},
          .b = {model.width, false},
          .leading_c = model.width,
          .dtype = model.dtype};
}
MatmulShape d_wte_shape(const ModelConfig& model, std::int64_t rows) {
  return {.m = model.vocabulary,
          .k = rows,
          .n = model.width,
          .a = {model.vocabulary, true},
          .b = {model.width, false},
          .leading_c = model.width,
          .add = true,
          .dtype = model.dtype};
}

}  // namespace

HeadActivations HeadActivations::carve(const ModelConfig& model, std::int64_t rows,
                                       Carver& carver) {
  HeadActivations a{};
  a.normal = carver.take(model.dtype, rows * model.width);
  a.d_normal = carver.take(model.dtype, rows * model.width);
  a.logits = carver.take<float>(rows * model.vocabulary);
  a.d_logits = carver.take(model.dtype, rows * model.vocabulary);
  a.losses = carver.take<float>(rows);
  a.stats = carver.take<kernels::RowStats>(rows);
  return a;
}

Head::Head(const ModelConfig& model, std::int64_t rows, std::size_t workers)
    : model_(model),
      rows_(rows),
      at_(model),
      logits_(logits_shape(model, rows), workers),
      d_normal_(d_normal_shape(model, rows), workers),
      d_wte_(d_wte_shape(model, rows), workers) {}

WideElements Head::wide_scratch(const ModelConfig& model, std::int64_t rows) {
  WideElements most;
  for (const MatmulShape& shape :
       {logits_shape(model, rows), d_normal_shape(model, rows), d_wte_shape(model, rows)}) {
    const WideElements needed = wide_elements_tiled(shape);
    most = {std::max(most.a, needed.a), std::max(most.b, needed.b)};
  }
  return most;
}

void Head::embed(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
                 std::int64_t context, Array x) const {
  team.for_each(piece_count(rows_, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_, kRowPiece);
    kernels::embed(tokens.data() + p.begin, p.count, model_.width, context, p.begin,
                   params + at_.wte, params + at_.wpe, x + p.begin * model_.width);
  });
}

void Head::embed_backward(Team& team, std::span<const std::uint8_t> tokens, std::int64_t context,
                          ConstArray dx, float* d_params) const {
  team.for_each(piece_count(model_.width, kColumnPiece), [&](std::size_t i) {
    const Piece p = piece(i, model_.width, kColumnPiece);
    kernels::embed_backward_columns(tokens.data(), rows_, model_.width, context, dx + p.begin,
                                    p.count, d_params + at_.wte + p.begin,
                                    d_params + at_.wpe + p.begin);
  });
}

void Head::logits(Team& team, std::span<const WorkerScratch> scratch, ConstArray params,
                  ConstArray x, const HeadActivations& a) const {
  team.for_each(piece_count(rows_, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_, kRowPiece);
    kernels::layernorm(x + p.begin * model_.width, p.count, model_.width,
                       {params + at_.ln_f_weight, params + at_.ln_f_bias},
                       a.normal + p.begin * model_.width, a.stats + p.begin);
  });
  team.for_each(logits_.tile_count(), [&](std::size_t i) {
    // Whole rows: a tile is a contiguous piece of the matrix.
    logits_.compute(i, team.index(), a.normal, params + at_.wte,
                    a.logits + logits_.tile(i).row * model_.vocabulary, scratch[team.index()].wide);
  });
}

void Head::loss(Team& team, std::span<const std::uint8_t> targets, float scale,
                const HeadActivations& a) const {
  team.for_each(piece_count(rows_, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_, kRowPiece);
    const std::int64_t first = p.begin * model_.vocabulary;
    kernels::cross_entropy(a.logits + first, targets.data() + p.begin, p.count, model_.vocabulary,
                           scale, a.losses + p.begin, scale == 0.0F ? Array() : a.d_logits + first);
  });
}

void Head::backward(Team& team, std::span<const WorkerScratch> scratch, ConstArray params, Array x,
                    const HeadActivations& a, float* d_params) const {
  const std::int64_t width = model_.width;
  together(team,
           Loop{d_normal_.tile_count(),
                [&](std::size_t i) {
                  const WorkerScratch& own = scratch[team.index()];
                  const TiledMatmul::Tile& t = d_normal_.tile(i);
                  d_normal_.compute(i, team.index(), a.d_logits, params + at_.wte, own.tile,
                                    own.wide);
                  kernels::store({own.tile, t.columns, t.rows, t.columns},
                                 {a.d_normal + t.row * width + t.column, width});
                }},
           Loop{d_wte_.tile_count(), [&](std::size_t i) {
                  d_wte_.accumulate(i, team.index(), a.d_logits, a.normal, d_params + at_.wte,
                                    scratch[team.index()].wide);
                }});
  team.for_each(piece_count(width, kColumnPiece), [&](std::size_t i) {
    const Piece p = piece(i, width, kColumnPiece);
    kernels::layernorm_backward_columns(
        {a.d_normal + p.begin, width}, {x + p.begin, width}, a.stats, rows_, p.count,
        d_params + at_.ln_f_weight + p.begin, d_params + at_.ln_f_bias + p.begin);
  });
  team.for_each(piece_count(rows_, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_, kRowPiece);
    const Array rows = x + p.begin * width;
    kernels::layernorm_backward(a.d_normal + p.begin * width, rows, a.stats + p.begin,
                                params + at_.ln_f_weight, p.count, width, {}, rows);
  });
}

}  // namespace ziggurat::gpt
