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
          .n = model.part_vocabulary(),
          .a = {model.width, false},
          .b = {model.width, true},
          .leading_c = model.part_vocabulary(),
          .whole_rows = true,
          .dtype = model.dtype};
}
MatmulShape d_normal_shape(const ModelConfig& model, std::int64_t rows) {
  return {.m = rows,
          .k = model.part_vocabulary(),
          .n = model.width,
          .a = {model.part_vocabulary(), false},
          .b = {model.width, false},
          .leading_c = model.width,
          .dtype = model.dtype};
}
MatmulShape d_wte_shape(const ModelConfig& model, std::int64_t rows) {
  return {.m = model.part_vocabulary(),
          .k = rows,
          .n = model.width,
          .a = {model.part_vocabulary(), true},
          .b = {model.width, false},
          .leading_c = model.width,
          .add = true,
          .dtype = model.dtype};
}

}  // namespace

HeadActivations HeadActivations::carve(const ModelConfig& model, const RowShare& rows,
                                       Carver& carver) {
  HeadActivations a{};
  a.normal = carver.take(model.dtype, rows.all * model.width);
  a.d_normal = carver.take(model.dtype, rows.all * model.width);
  a.logits = carver.take<float>(rows.all * model.part_vocabulary());
  a.d_logits = carver.take(model.dtype, rows.all * model.part_vocabulary());
  a.losses = carver.take<float>(rows.all);
  a.stats = carver.take<kernels::RowStats>(rows.own);
  if (model.part.ranks > 1)
    a.logits_parts = carver.take<kernels::LogitsPart>(model.part.ranks * rows.all);
  return a;
}

Head::Head(const ModelConfig& model, const RowShare& rows, std::size_t workers)
    : model_(model),
      rows_(rows),
      at_(model),
      logits_(logits_shape(model, rows.all), workers),
      d_normal_(d_normal_shape(model, rows.all), workers),
      d_wte_(d_wte_shape(model, rows.all), workers) {}

WideElements Head::wide_scratch(const ModelConfig& model, const RowShare& rows) {
  WideElements most;
  for (const MatmulShape& shape : {logits_shape(model, rows.all), d_normal_shape(model, rows.all),
                                   d_wte_shape(model, rows.all)}) {
    const WideElements needed = wide_elements_tiled(shape);
    most = {std::max(most.a, needed.a), std::max(most.b, needed.b)};
  }
  return most;
}

void Head::embed(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
                 std::int64_t context, Array x) const {
  team.for_each(piece_count(rows_.all, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.all, kRowPiece);
    kernels::embed(tokens.data() + p.begin, p.count, model_.width, context, p.begin,
                   params + at_.wte, params + at_.wpe, x + p.begin * model_.width);
  });
}

void Head::embed_tokens(Team& team, ConstArray params, std::span<const std::uint8_t> tokens,
                        Array partial) const {
  team.for_each(piece_count(rows_.all, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.all, kRowPiece);
    kernels::embed_tokens(tokens.data() + p.begin, p.count, model_.width, this->tokens(),
                          params + at_.wte, partial + p.begin * model_.width);
  });
}

void Head::add_positions(Team& team, ConstArray params, std::int64_t context, ConstArray sum,
                         Array x) const {
  team.for_each(piece_count(rows_.own, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.own, kRowPiece);
    const std::int64_t row = rows_.first + p.begin;
    kernels::add_positions(p.count, model_.width, context, row, params + at_.wpe,
                           sum + row * model_.width, x + p.begin * model_.width);
  });
}

void Head::embed_backward(Team& team, std::span<const std::uint8_t> tokens, std::int64_t context,
                          ConstArray dx, ConstArray all_dx, float* d_params) const {
  team.for_each(piece_count(model_.width, kColumnPiece), [&](std::size_t i) {
    const Piece p = piece(i, model_.width, kColumnPiece);
    float* const d_wte = d_params + at_.wte + p.begin;
    float* const d_wpe = d_params + at_.wpe + p.begin;
    if (!divided()) {
      return kernels::embed_backward_columns(tokens.data(), rows_.all, model_.width, context,
                                             dx + p.begin, p.count, d_wte, d_wpe);
    }
    kernels::embed_tokens_backward_columns(tokens.data(), rows_.all, model_.width, this->tokens(),
                                           all_dx + p.begin, p.count, d_wte);
    kernels::add_positions_backward_columns(rows_.own, model_.width, context, rows_.first,
                                            dx + p.begin, p.count, d_wpe);
  });
}

void Head::norm(Team& team, ConstArray params, ConstArray x, const HeadActivations& a) const {
  team.for_each(piece_count(rows_.own, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.own, kRowPiece);
    kernels::layernorm(x + p.begin * model_.width, p.count, model_.width,
                       {params + at_.ln_f_weight, params + at_.ln_f_bias},
                       a.normal + (rows_.first + p.begin) * model_.width, a.stats + p.begin);
  });
}

void Head::logits(Team& team, std::span<const WorkerScratch> scratch, ConstArray params,
                  const HeadActivations& a) const {
  team.for_each(logits_.tile_count(), [&](std::size_t i) {
    // A tile has whole rows, so it is a contiguous piece of the matrix.
    logits_.compute(i, team.index(), a.normal, params + at_.wte,
                    a.logits + logits_.tile(i).row * model_.part_vocabulary(),
                    scratch[team.index()].wide);
  });
}

void Head::softmax_part(Team& team, std::span<const std::uint8_t> targets,
                        const HeadActivations& a) const {
  kernels::LogitsPart* const own = a.logits_parts + model_.part.rank * rows_.all;
  team.for_each(piece_count(rows_.all, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.all, kRowPiece);
    kernels::softmax_part(a.logits + p.begin * model_.part_vocabulary(), targets.data() + p.begin,
                          p.count, tokens(), own + p.begin);
  });
}

void Head::loss(Team& team, std::span<const std::uint8_t> targets, float scale,
                const HeadActivations& a) const {
  team.for_each(piece_count(rows_.all, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.all, kRowPiece);
    const std::int64_t first = p.begin * model_.part_vocabulary();
    const Array d_logits = scale == 0.0F ? Array() : a.d_logits + first;
    if (divided()) {
      return kernels::cross_entropy_of_parts(
          a.logits + first, {a.logits_parts + p.begin, rows_.all, model_.part.ranks},
          targets.data() + p.begin, p.count, tokens(), scale, a.losses + p.begin, d_logits);
    }
    kernels::cross_entropy(a.logits + first, targets.data() + p.begin, p.count, model_.vocabulary,
                           scale, a.losses + p.begin, d_logits);
  });
}

void Head::logits_backward(Team& team, std::span<const WorkerScratch> scratch, ConstArray params,
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
}

void Head::norm_backward(Team& team, ConstArray params, Array x, const HeadActivations& a,
                         float* d_params) const {
  const std::int64_t width = model_.width;
  const ConstArray d_normal = a.d_normal + rows_.first * width;
  team.for_each(piece_count(width, kColumnPiece), [&](std::size_t i) {
    const Piece p = piece(i, width, kColumnPiece);
    kernels::layernorm_backward_columns({d_normal + p.begin, width}, {x + p.begin, width}, a.stats,
                                        rows_.own, p.count, d_params + at_.ln_f_weight + p.begin,
                                        d_params + at_.ln_f_bias + p.begin);
  });
  team.for_each(piece_count(rows_.own, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.own, kRowPiece);
    const Array rows = x + p.begin * width;
    kernels::layernorm_backward(d_normal + p.begin * width, rows, a.stats + p.begin,
                                params + at_.ln_f_weight, p.count, width, {}, rows);
  });
}

}  // namespace ziggurat::gpt
