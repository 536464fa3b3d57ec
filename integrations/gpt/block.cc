// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/block.cc: the phases of a block.
#include "integrations/gpt/block.h"

#include <algorithm>
#include <span>

#include "integrations/gpt/phases.h"

namespace ziggurat::gpt {
namespace {

using kernels::ConstRows;
using kernels::Rows;

// The product y[rows, out] = x[rows, in] W[in, out]; below, the shapes of it and of its two
// gradients.
struct Linear {
  std::int64_t rows, in, out;
  DType dtype;
};
MatmulShape product(const Linear& l) {
  return {.m = l.rows,
          .k = l.in,
          .n = l.out,
          .a = {l.in, false},
          .b = {l.out, false},
          .leading_c = l.out,
          .dtype = l.dtype};
}
MatmulShape input_gradient(const Linear& l) {
  return {.m = l.rows,
          .k = l.out,
          .n = l.in,
          .a = {l.out, false},
          .b = {l.out, true},
          .leading_c = l.in,
          .dtype = l.dtype};
}
MatmulShape weight_gradient(const Linear& l) {
  return {.m = l.in,
          .k = l.rows,
          .n = l.out,
          .a = {l.in, true},
          .b = {l.out, false},
          .leading_c = l.out,
          .add = true,
          .dtype = l.dtype};
}

Linear qkv(const ModelConfig& model, std::int64_t rows) {
  return {rows, model.width, 3 * model.part_width(), model.dtype};
}
Linear attention_projection(const ModelConfig& model, std::int64_t rows) {
  return {rows, model.part_width(), model.width, model.dtype};
}
Linear fc(const ModelConfig& model, std::int64_t rows) {
  return {rows, model.width, model.part_hidden(), model.dtype};
}
Linear mlp_projection(const ModelConfig& model, std::int64_t rows) {
  return {rows, model.part_hidden(), model.width, model.dtype};
}

// Returns the part of `out` to which this tile of the product belongs.
Rows at_tile(Array out, std::int64_t leading, const TiledMatmul::Tile& tile) {
  return {out + tile.row * leading + tile.column, leading};
}

// Returns a loop over a product's tiles, which runs `epilogue(tile, values)` on each while it is in
// cache.
template <class Epilogue>
auto product_loop(Team& team, std::span<const WorkerScratch> scratch, const TiledMatmul& matmul,
                  ConstArray a, ConstArray b, const Epilogue& epilogue) {
  return Loop{matmul.tile_count(), [&team, &matmul, &epilogue, scratch, a, b](std::size_t i) {
                const WorkerScratch& own = scratch[team.index()];
                const TiledMatmul::Tile& tile = matmul.tile(i);
                matmul.compute(i, team.index(), a, b, own.tile, own.wide);
                epilogue(tile, kernels::Tile{own.tile, tile.columns, tile.rows, tile.columns});
              }};
}

auto weight_gradient_loop(Team& team, std::span<const WorkerScratch> scratch,
                          const TiledMatmul& matmul, ConstArray input, ConstArray d_output,
                          float* d_weight) {
  return Loop{
      matmul.tile_count(), [&team, &matmul, scratch, input, d_output, d_weight](std::size_t i) {
        matmul.accumulate(i, team.index(), input, d_output, d_weight, scratch[team.index()].wide);
      }};
}

auto bias_gradient_loop(ConstArray d_output, std::int64_t rows, std::int64_t columns,
                        float* d_bias) {
  return Loop{
      piece_count(columns, kColumnPiece), [=](std::size_t i) {
        const Piece p = piece(i, columns, kColumnPiece);
        kernels::add_column_sums({d_output + p.begin, columns}, rows, p.count, d_bias + p.begin);
      }};
}

}  // namespace

BlockActivations BlockActivations::carve(const ModelConfig& model, const RowShare& rows,
                                         Carver& carver) {
  const std::int64_t wide = rows.all * model.width;
  const std::int64_t part = rows.all * model.part_width();
  BlockActivations a{};
  a.ln_1 = carver.take(model.dtype, wide);
  a.qkv = carver.take(model.dtype, 3 * part);
  a.attention = carver.take(model.dtype, part);
  a.middle = carver.take(model.dtype, rows.own * model.width);
  a.ln_2 = carver.take(model.dtype, wide);
  a.before_gelu = carver.take(model.dtype, rows.all * model.part_hidden());
  a.gelu = carver.take(model.dtype, rows.all * model.part_hidden());
  a.ln_1_stats = carver.take<kernels::RowStats>(rows.own);
  a.softmax_stats = carver.take<kernels::RowStats>(rows.all * model.part_heads());
  a.ln_2_stats = carver.take<kernels::RowStats>(rows.own);
  return a;
}

Block::Block(const ModelConfig& model, const Shape& shape, std::size_t workers)
    : model_(model),
      shape_(shape),
      rows_(shape.rows),
      at_(model),
      attention_(model, shape.context, workers),
      qkv_(product(qkv(model, rows_.all)), workers),
      attention_projection_(product(attention_projection(model, rows_.all)), workers),
      fc_(product(fc(model, rows_.all)), workers),
      mlp_projection_(product(mlp_projection(model, rows_.all)), workers),
      d_qkv_input_(input_gradient(qkv(model, rows_.all)), workers),
      d_attention_projection_input_(input_gradient(attention_projection(model, rows_.all)),
                                    workers),
      d_fc_input_(input_gradient(fc(model, rows_.all)), workers),
      d_mlp_projection_input_(input_gradient(mlp_projection(model, rows_.all)), workers),
      d_qkv_weight_(weight_gradient(qkv(model, rows_.all)), workers),
      d_attention_projection_weight_(weight_gradient(attention_projection(model, rows_.all)),
                                     workers),
      d_fc_weight_(weight_gradient(fc(model, rows_.all)), workers),
      d_mlp_projection_weight_(weight_gradient(mlp_projection(model, rows_.all)), workers) {}

WideElements Block::wide_scratch(const ModelConfig& model, const Shape& shape) {
  const std::int64_t rows = shape.batch * shape.context;
  WideElements most = Attention::wide_scratch(model, shape.context);
  for (const Linear& linear : {qkv(model, rows), attention_projection(model, rows), fc(model, rows),
                               mlp_projection(model, rows)}) {
    for (const MatmulShape& s :
         {product(linear), input_gradient(linear), weight_gradient(linear)}) {
      const WideElements needed = wide_elements_tiled(s);
      most = {std::max(most.a, needed.a), std::max(most.b, needed.b)};
    }
  }
  return most;
}

// Returns where a head's values are. Heads are numbered sequence by sequence.
HeadView Block::head(const BlockActivations& activations, std::size_t index) const {
  const std::int64_t width = model_.part_width();
  const auto sequence = static_cast<std::int64_t>(index) / model_.part_heads();
  const auto number = static_cast<std::int64_t>(index) % model_.part_heads();
  const Array first =
      activations.qkv + sequence * shape_.context * 3 * width + number * model_.head_width();
  return {.queries = first,
          .keys = first + width,
          .values = first + 2 * width,
          .stats = activations.softmax_stats + static_cast<std::int64_t>(index) * shape_.context};
}

// Returns where a head's columns start, at its sequence's first row of a matrix of all this rank's
// heads.
std::int64_t Block::head_begin(std::size_t index) const {
  const auto sequence = static_cast<std::int64_t>(index) / model_.part_heads();
  const auto number = static_cast<std::int64_t>(index) % model_.part_heads();
  return sequence * shape_.context * model_.part_width() + number * model_.head_width();
}

void Block::forward(Team& team, std::span<const WorkerScratch> scratch, const Forward& pass) const {
  norm_1(team, pass);
  attend(team, scratch, pass);
  norm_2(team, pass);
  mlp(team, scratch, pass);
}

void Block::norm_1(Team& team, const Forward& pass) const {
  const std::int64_t width = model_.width;
  const BlockActivations& a = pass.activations;
  team.for_each(piece_count(rows_.own, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.own, kRowPiece);
    kernels::layernorm(pass.x + p.begin * width, p.count, width,
                       {pass.params + at_.ln_1_weight, pass.params + at_.ln_1_bias},
                       a.ln_1 + (rows_.first + p.begin) * width, a.ln_1_stats + p.begin);
  });
}

void Block::attend(Team& team, std::span<const WorkerScratch> scratch, const Forward& pass) const {
  const std::int64_t width = model_.width;
  const ConstArray params = pass.params;
  const BlockActivations& a = pass.activations;
  const auto add_bias = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    kernels::store_bias(values, params + at_.qkv_bias + t.column,
                        at_tile(a.qkv, 3 * model_.part_width(), t));
  };
  together(team, product_loop(team, scratch, qkv_, a.ln_1, params + at_.qkv_weight, add_bias));

  team.for_each(static_cast<std::size_t>(shape_.batch * model_.part_heads()), [&](std::size_t i) {
    attention_.forward(team.index(), head(a, i), a.attention + head_begin(i),
                       scratch[team.index()]);
  });

  const auto add_to_x = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    if (divided()) return kernels::store(values, at_tile(pass.partial, width, t));
    kernels::store_bias_residual(values, params + at_.attention_projection_bias + t.column,
                                 {pass.x + t.row * width + t.column, width},
                                 at_tile(a.middle, width, t));
  };
  together(team, product_loop(team, scratch, attention_projection_, a.attention,
                              params + at_.attention_projection_weight, add_to_x));
}

void Block::norm_2(Team& team, const Forward& pass) const {
  const std::int64_t width = model_.width;
  const ConstArray params = pass.params;
  const BlockActivations& a = pass.activations;
  team.for_each(piece_count(rows_.own, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.own, kRowPiece);
    const Array middle = a.middle + p.begin * width;
    if (divided()) {
      kernels::add_bias_residual(pass.partial + (rows_.first + p.begin) * width,
                                 params + at_.attention_projection_bias, pass.x + p.begin * width,
                                 p.count, width, middle);
    }
    kernels::layernorm(middle, p.count, width, {params + at_.ln_2_weight, params + at_.ln_2_bias},
                       a.ln_2 + (rows_.first + p.begin) * width, a.ln_2_stats + p.begin);
  });
}

void Block::mlp(Team& team, std::span<const WorkerScratch> scratch, const Forward& pass) const {
  const std::int64_t width = model_.width;
  const std::int64_t hidden = model_.part_hidden();
  const ConstArray params = pass.params;
  const BlockActivations& a = pass.activations;
  const auto gelu = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    const Rows before = pass.keep == Keep::kAll ? at_tile(a.before_gelu, hidden, t) : Rows{};
    kernels::store_bias_gelu(values, params + at_.fc_bias + t.column, before,
                             at_tile(a.gelu, hidden, t));
  };
  together(team, product_loop(team, scratch, fc_, a.ln_2, params + at_.fc_weight, gelu));

  if (!pass.y) return;
  const auto add_to_middle = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    if (divided()) return kernels::store(values, at_tile(pass.partial, width, t));
    kernels::store_bias_residual(values, params + at_.mlp_projection_bias + t.column,
                                 {a.middle + t.row * width + t.column, width},
                                 at_tile(pass.y, width, t));
  };
  together(team, product_loop(team, scratch, mlp_projection_, a.gelu,
                              params + at_.mlp_projection_weight, add_to_middle));
}

void Block::add_mlp(Team& team, const Forward& pass) const {
  const std::int64_t width = model_.width;
  team.for_each(piece_count(rows_.own, kRowPiece), [&](std::size_t i) {
    const Piece p = piece(i, rows_.own, kRowPiece);
    kernels::add_bias_residual(
        pass.partial + (rows_.first + p.begin) * width, pass.params + at_.mlp_projection_bias,
        pass.activations.middle + p.begin * width, p.count, width, pass.y + p.begin * width);
  });
}

void Block::backward(Team& team, std::span<const WorkerScratch> scratch,
                     const Backward& pass) const {
  mlp_backward(team, scratch, pass);
  norm_2_backward(team, pass);
  attention_backward(team, scratch, pass);
  norm_1_backward(team, pass);
}

// Goes backward through y = middle + gelu W + b. The longest tiles come first, so that the short
// column sums fill the end of a phase.
void Block::mlp_backward(Team& team, std::span<const WorkerScratch> scratch,
                         const Backward& pass) const {
  const std::int64_t width = model_.width;
  const std::int64_t hidden = model_.part_hidden();
  const ConstArray params = pass.params;
  float* d_params = pass.d_params;
  const BlockActivations& a = pass.activations;
  const auto through_gelu = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    kernels::store_gelu_backward(values, at_tile(a.before_gelu, hidden, t));
  };
  together(team,
           weight_gradient_loop(team, scratch, d_mlp_projection_weight_, a.gelu, pass.all_gradient,
                                d_params + at_.mlp_projection_weight),
           product_loop(team, scratch, d_mlp_projection_input_, pass.all_gradient,
                        params + at_.mlp_projection_weight, through_gelu),
           bias_gradient_loop(pass.gradient, rows_.own, width, d_params + at_.mlp_projection_bias));
  const ConstArray d_hidden = a.before_gelu;  // through_gelu() has replaced the values

  const auto to_rows = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    kernels::store(values, at_tile(pass.d_rows, width, t));
  };
  together(
      team,
      weight_gradient_loop(team, scratch, d_fc_weight_, a.ln_2, d_hidden, d_params + at_.fc_weight),
      product_loop(team, scratch, d_fc_input_, d_hidden, params + at_.fc_weight, to_rows),
      bias_gradient_loop(d_hidden, rows_.all, hidden, d_params + at_.fc_bias));
}

// Takes the own rows of d_rows backward through a norm of `in`, and adds the result to the
// gradient.
void Block::norm_backward(Team& team, const Norm& norm, ConstArray in, const Backward& pass) const {
  const std::int64_t width = model_.width;
  const ConstArray d_out = pass.d_rows + rows_.first * width;
  together(team,
           Loop{piece_count(rows_.own, kRowPiece),
                [&](std::size_t i) {
                  const Piece p = piece(i, rows_.own, kRowPiece);
                  const Array gradient = pass.gradient + p.begin * width;
                  kernels::layernorm_backward(d_out + p.begin * width, in + p.begin * width,
                                              norm.stats + p.begin, pass.params + norm.weight,
                                              p.count, width, gradient, gradient);
                }},
           Loop{piece_count(width, kColumnPiece), [&](std::size_t i) {
                  const Piece p = piece(i, width, kColumnPiece);
                  kernels::layernorm_backward_columns(
                      {d_out + p.begin, width}, {in + p.begin, width}, norm.stats, rows_.own,
                      p.count, pass.d_params + norm.weight + p.begin,
                      pass.d_params + norm.bias + p.begin);
                }});
}

void Block::norm_2_backward(Team& team, const Backward& pass) const {
  norm_backward(team, {at_.ln_2_weight, at_.ln_2_bias, pass.activations.ln_2_stats},
                pass.activations.middle, pass);
}

// Goes backward through middle = x + attention W + b.
void Block::attention_backward(Team& team, std::span<const WorkerScratch> scratch,
                               const Backward& pass) const {
  const std::int64_t width = model_.width;
  const std::int64_t heads_width = model_.part_width();
  const ConstArray params = pass.params;
  float* d_params = pass.d_params;
  const BlockActivations& a = pass.activations;
  const auto to_heads = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    kernels::store(values, at_tile(pass.d_rows, heads_width, t));
  };
  together(team,
           weight_gradient_loop(team, scratch, d_attention_projection_weight_, a.attention,
                                pass.all_gradient, d_params + at_.attention_projection_weight),
           product_loop(team, scratch, d_attention_projection_input_, pass.all_gradient,
                        params + at_.attention_projection_weight, to_heads),
           bias_gradient_loop(pass.gradient, rows_.own, width,
                              d_params + at_.attention_projection_bias));

  team.for_each(static_cast<std::size_t>(shape_.batch * model_.part_heads()), [&](std::size_t i) {
    const std::int64_t at = head_begin(i);
    attention_.backward(team.index(), head(a, i), a.attention + at, pass.d_rows + at,
                        scratch[team.index()]);
  });

  const auto to_rows = [&](const TiledMatmul::Tile& t, const kernels::Tile& values) {
    kernels::store(values, at_tile(pass.d_rows, width, t));
  };
  together(
      team,
      weight_gradient_loop(team, scratch, d_qkv_weight_, a.ln_1, a.qkv, d_params + at_.qkv_weight),
      product_loop(team, scratch, d_qkv_input_, a.qkv, params + at_.qkv_weight, to_rows),
      bias_gradient_loop(a.qkv, rows_.all, 3 * heads_width, d_params + at_.qkv_bias));
}

void Block::norm_1_backward(Team& team, const Backward& pass) const {
  norm_backward(team, {at_.ln_1_weight, at_.ln_1_bias, pass.activations.ln_1_stats}, pass.x, pass);
}

}  // namespace ziggurat::gpt
