// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/kernels.h: everything in GPT-2 that is not a matrix product, in a fixed order of
// operations.
//
// Same bits on every SIMD target: only + - x / and sqrt, never fused, exp from its own polynomial;
// horizontal sums run over 16 virtual lanes and a fixed tree, column sums row by row. Matrices are
// row-major; `columns` are multiples of 16 unless a function says "any". The arrays of a call have
// one element type. Plain functions, callable from any worker.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "integrations/gpt/array.h"

namespace ziggurat::gpt::kernels {

/// Two numbers kept per row for the backward pass: (mean, 1 / deviation) of a layernorm, (maximum,
/// 1 / sum) of a softmax.
struct RowStats {
  float first;
  float second;
};

/// A matrix whose rows begin `leading` elements apart.
struct Rows {
  Array data;
  std::int64_t leading;
};
struct ConstRows {
  ConstArray data;
  std::int64_t leading;
  ConstRows(ConstArray d, std::int64_t l) : data(d), leading(l) {}
  ConstRows(const Rows& rows)
      : data(rows.data), leading(rows.leading) {}  // NOLINT: a view of a view
};
/// An fp32 tile of a matrix product.
struct Tile {
  const float* data;
  std::int64_t leading;
  std::int64_t rows;
  std::int64_t columns;
};

void widen(ConstArray from, std::int64_t count, float* to);  // any count

// The epilogues of products take an fp32 tile and round it to the type of `out`.
void store(const Tile& tile, Rows out);  // any columns
void store_bias(const Tile& tile, ConstArray bias, Rows out);
void store_bias_residual(const Tile& tile, ConstArray bias, ConstRows residual, Rows out);
/// Computes out = residual + (sum + bias) row by row, as store_bias_residual() does, from a `sum`
/// that was already rounded.
void add_bias_residual(ConstArray sum, ConstArray bias, ConstArray residual, std::int64_t rows,
                       std::int64_t width, Array out);
/// Computes out = gelu(round(tile + bias)) in tanh form. The rounded argument goes to `before`
/// unless its data is null.
void store_bias_gelu(const Tile& tile, ConstArray bias, Rows before, Rows out);
/// Replaces gelu's argument in `before` by tile * gelu'(argument).
void store_gelu_backward(const Tile& tile, Rows before);

/// The affine part of a layernorm.
struct Affine {
  ConstArray weight;
  ConstArray bias;
};
/// Computes y = (x - mean) / sqrt(variance + 1e-5) * weight + bias, row by row.
void layernorm(ConstArray x, std::int64_t rows, std::int64_t width, const Affine& affine, Array y,
               RowStats* stats);
/// Computes out = d loss / d x from dy = d loss / d y, and adds `residual` unless that is null.
/// `out` may be `residual` or `x`.
void layernorm_backward(ConstArray dy, ConstArray x, const RowStats* stats, ConstArray weight,
                        std::int64_t rows, std::int64_t width, ConstArray residual, Array out);
/// Adds d_weight and d_bias of `columns` columns over all rows, in the rows' order.
void layernorm_backward_columns(ConstRows dy, ConstRows x, const RowStats* stats, std::int64_t rows,
                                std::int64_t columns, float* d_weight, float* d_bias);
/// Adds the sum of column c to sums[c], row by row.
void add_column_sums(ConstRows x, std::int64_t rows, std::int64_t columns, float* sums);

/// Describes a block of attention rows: row i is position first + i and sees keys 0 .. first + i.
struct CausalRows {
  std::int64_t rows;
  std::int64_t first;
  std::int64_t leading;  ///< row length of scores and probabilities: multiple of 16, >= first +
                         ///< rows
  float scale;           ///< multiplies the raw scores
};
/// Computes probabilities = softmax(scale * scores) over the keys that a row sees, and 0 from there
/// to the end of the row. Overwrites `scores`.
void causal_softmax(const CausalRows& shape, float* scores, Array probabilities, RowStats* stats);
/// Computes the probabilities again from `scores` and `stats`, and d_scores = scale * p *
/// (d_probabilities - dots[row]).
void causal_softmax_backward(const CausalRows& shape, const float* scores, const RowStats* stats,
                             const float* d_probabilities, const float* dots, Array probabilities,
                             Array d_scores);
/// Computes dots[r] = sum over columns of a[r][c] * b[r][c]; any columns.
void row_dots(ConstRows a, ConstRows b, std::int64_t rows, std::int64_t columns, float* dots);

/// Computes x = wte[token] + wpe[position]. Positions count from `first` and start over every
/// `context` rows.
void embed(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width, std::int64_t context,
           std::int64_t first, ConstArray wte, ConstArray wpe, Array x);
/// Adds the gradients of embed() for `columns` columns. Takes rows in order, so that equal tokens
/// add up in a fixed order.
void embed_backward_columns(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                            std::int64_t context, ConstArray dx, std::int64_t columns, float* d_wte,
                            float* d_wpe);

/// A range of a vocabulary's tokens.
struct TokenRange {
  std::int64_t first;
  std::int64_t count;
};
/// Embeds in two steps, for a rank that has only the vectors of the tokens in `range`.
/// embed_tokens() gives 0 for all other tokens; once the ranks have added these results up,
/// add_positions() computes x = sum + wpe[position].
void embed_tokens(const std::uint8_t* tokens, std::int64_t rows, std::int64_t width,
                  TokenRange range, ConstArray wte, Array x);
void add_positions(std::int64_t rows, std::int64_t width, std::int64_t context, std::int64_t first,
                   ConstArray wpe, ConstArray sum, Array x);
void embed_tokens_backward_columns(const std::uint8_t* tokens, std::int64_t rows,
                                   std::int64_t width, TokenRange range, ConstArray dx,
                                   std::int64_t columns, float* d_wte);
void add_positions_backward_columns(std::int64_t rows, std::int64_t width, std::int64_t context,
                                    std::int64_t first, ConstArray dx, std::int64_t columns,
                                    float* d_wpe);

/// Computes losses[r] = -log softmax(logits[r])[targets[r]], and d_logits = scale * (softmax - one
/// hot) unless `d_logits` is null.
void cross_entropy(const float* logits, const std::uint8_t* targets, std::int64_t rows,
                   std::int64_t vocabulary, float scale, float* losses, Array d_logits);

/// What the softmax of a row needs from one rank's columns of the logits.
struct LogitsPart {
  float maximum;
  float sum;     ///< of exp(logit - maximum)
  float target;  ///< the target's logit, or 0 if another rank has it
};
void softmax_part(const float* logits, const std::uint8_t* targets, std::int64_t rows,
                  TokenRange range, LogitsPart* parts);
/// The parts of all ranks for the same rows; rank r's part of row 0 is parts[r * stride].
struct LogitsParts {
  const LogitsPart* parts;
  std::int64_t stride;
  std::int64_t ranks;
};
/// Computes losses and gradient as cross_entropy() does, from the columns of `range`; adds ranks in
/// their order.
void cross_entropy_of_parts(const float* logits, const LogitsParts& all,
                            const std::uint8_t* targets, std::int64_t rows, TokenRange range,
                            float scale, float* losses, Array d_logits);

/// List the SIMD targets that this CPU runs, best first, and force one of them; an empty name
/// chooses the best again. Tests check that no bit changes.
std::vector<std::string_view> simd_targets();
void force_simd_target(std::string_view name);

}  // namespace ziggurat::gpt::kernels
