// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/attention.cc: attention by blocks of queries, over oneDNN's products and the
// softmax kernels.
#include "integrations/gpt/attention.h"

#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "core/plan/machines/machine.h"

namespace ziggurat::gpt {
namespace {

constexpr std::int64_t kQueryBlock = kAttentionBlock;

std::int64_t scores_leading(std::int64_t context) {
  return static_cast<std::int64_t>(round_up(static_cast<std::uint64_t>(context), 16));
}

struct Shapes {
  MatmulShape scores, out, d_probabilities, d_queries, d_keys, d_values;
};

// Returns the shapes of the products of `rows` queries with `keys` keys.
Shapes shapes_of(const ModelConfig& model, std::int64_t context, std::int64_t rows,
                 std::int64_t keys) {
  const std::int64_t d = model.head_width();
  const Layout qkv{3 * model.part_width(), false};
  const Layout qkv_transposed{3 * model.part_width(), true};
  const Layout out{model.part_width(), false};
  const Layout square{scores_leading(context), false};
  const Layout square_transposed{scores_leading(context), true};
  Shapes shapes{
      .scores = {.m = rows,
                 .k = d,
                 .n = keys,
                 .a = qkv,
                 .b = qkv_transposed,
                 .leading_c = square.leading},
      .out = {.m = rows, .k = keys, .n = d, .a = square, .b = qkv, .leading_c = d},
      .d_probabilities = {.m = rows,
                          .k = d,
                          .n = keys,
                          .a = out,
                          .b = qkv_transposed,
                          .leading_c = square.leading},
      .d_queries = {.m = rows, .k = keys, .n = d, .a = square, .b = qkv, .leading_c = d},
      .d_keys = {.m = keys,
                 .k = rows,
                 .n = d,
                 .a = square_transposed,
                 .b = qkv,
                 .leading_c = d,
                 .add = true},
      .d_values = {.m = keys,
                   .k = rows,
                   .n = d,
                   .a = square_transposed,
                   .b = out,
                   .leading_c = d,
                   .add = true},
  };
  for (MatmulShape* shape : {&shapes.scores, &shapes.out, &shapes.d_probabilities,
                             &shapes.d_queries, &shapes.d_keys, &shapes.d_values}) {
    shape->dtype = model.dtype;
  }
  return shapes;
}

}  // namespace

Attention::Attention(const ModelConfig& model, std::int64_t context, std::size_t workers)
    : context_(context),
      width_(model.part_width()),
      head_width_(model.head_width()),
      leading_(scores_leading(context)) {
  for (std::int64_t first = 0; first < context; first += kQueryBlock) {
    const std::int64_t rows = std::min(kQueryBlock, context - first);
    const Shapes s = shapes_of(model, context, rows, first + rows);
    blocks_.push_back({first, rows, Matmul(s.scores, workers), Matmul(s.out, workers),
                       Matmul(s.d_probabilities, workers), Matmul(s.d_queries, workers),
                       Matmul(s.d_keys, workers), Matmul(s.d_values, workers)});
  }
}

void Attention::carve(const ModelConfig& model, std::int64_t context, Carver& carver,
                      WorkerScratch& scratch) {
  const std::int64_t square = std::min(kQueryBlock, context) * scores_leading(context);
  scratch.scores = carver.take<float>(square);
  scratch.d_probabilities = carver.take<float>(square);
  scratch.probabilities = carver.take(model.dtype, square);
  scratch.d_scores = carver.take(model.dtype, square);
  scratch.d_keys = carver.take<float>(context * model.head_width());
  scratch.d_values = carver.take<float>(context * model.head_width());
  scratch.dots = carver.take<float>(kQueryBlock);
}

WideElements Attention::wide_scratch(const ModelConfig& model, std::int64_t context) {
  const Shapes s = shapes_of(model, context, std::min(kQueryBlock, context), context);
  WideElements most;
  for (const MatmulShape& shape :
       {s.scores, s.out, s.d_probabilities, s.d_queries, s.d_keys, s.d_values}) {
    const WideElements needed = wide_elements(shape);
    most = {std::max(most.a, needed.a), std::max(most.b, needed.b)};
  }
  return most;
}

kernels::CausalRows Attention::causal(const QueryBlock& block) const {
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_width_));
  return {.rows = block.rows, .first = block.first, .leading = leading_, .scale = scale};
}

void Attention::forward(std::size_t worker, const HeadView& head, Array out,
                        const WorkerScratch& scratch) const {
  for (const QueryBlock& block : blocks_) {
    const ConstArray queries = head.queries + block.first * 3 * width_;
    block.scores.execute(worker, queries, head.keys, scratch.scores, scratch.wide);
    kernels::causal_softmax(causal(block), scratch.scores, scratch.probabilities,
                            head.stats + block.first);
    block.out.execute(worker, scratch.probabilities, head.values, scratch.tile, scratch.wide);
    kernels::store({scratch.tile, head_width_, block.rows, head_width_},
                   {out + block.first * width_, width_});
  }
}

void Attention::backward(std::size_t worker, const HeadView& head, ConstArray out, ConstArray d_out,
                         const WorkerScratch& scratch) const {
  std::fill_n(scratch.d_keys, context_ * head_width_, 0.0F);
  std::fill_n(scratch.d_values, context_ * head_width_, 0.0F);
  for (const QueryBlock& block : blocks_) {
    const Array queries = head.queries + block.first * 3 * width_;
    const ConstArray d_rows = d_out + block.first * width_;
    block.scores.execute(worker, queries, head.keys, scratch.scores, scratch.wide);
    block.d_probabilities.execute(worker, d_rows, head.values, scratch.d_probabilities,
                                  scratch.wide);
    kernels::row_dots({d_rows, width_}, {out + block.first * width_, width_}, block.rows,
                      head_width_, scratch.dots);
    kernels::causal_softmax_backward(causal(block), scratch.scores, head.stats + block.first,
                                     scratch.d_probabilities, scratch.dots, scratch.probabilities,
                                     scratch.d_scores);
    block.d_values.execute(worker, scratch.probabilities, d_rows, scratch.d_values, scratch.wide);
    block.d_keys.execute(worker, scratch.d_scores, queries, scratch.d_keys, scratch.wide);
    block.d_queries.execute(worker, scratch.d_scores, head.keys, scratch.tile, scratch.wide);
    // Overwrites these queries, which no later block needs; keys and values are needed to the end.
    kernels::store({scratch.tile, head_width_, block.rows, head_width_}, {queries, 3 * width_});
  }
  kernels::store({scratch.d_keys, head_width_, context_, head_width_}, {head.keys, 3 * width_});
  kernels::store({scratch.d_values, head_width_, context_, head_width_}, {head.values, 3 * width_});
}

}  // namespace ziggurat::gpt
