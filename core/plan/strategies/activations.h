// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/activations.h: bytes of activations, by layer and token.
//
// A block keeps for backward, a token, with 16-bit activations (Korthikanti et al. 2022,
// section 4.1, where they sum to s b h (34 + 5 a s / h) for GPT's block with dropout):
//
//   norms          each keeps its input (2h, or 4h in fp32) and output (2h)
//   attention      q, k and v; q and k once more where they are normed; its output; with scores
//                  5 a s (softmax, dropout mask, dropped), with flash a sum of 4 a
//   MLP            its two inputs 2f each (gated), or one and its activation, and the product
//   experts        their permuted inputs and outputs, the same of f, and outputs in fp32
//   dropout        a mask of h after attention and MLP
//
// With selective recomputation, scores are made again; where flash keeps none, the norms' outputs
// (4h) and the MLP's product (2f) are. Tensor ranks divide what depends on heads or f; with
// sequence parallelism all of it. Pure functions; any thread.
#pragma once

#include "core/plan/strategies/training.h"

namespace ziggurat {

/// Returns the bytes that a layer keeps for backward, of one micro-batch, on one rank, if it is not
/// made again whole.
double saved_bytes(const Training& training, bool experts);

/// Returns the bytes that a layer's backward needs, kept or made again.
double needed_bytes(const Training& training, bool experts);

/// Returns the bytes of gradients that the backward of a layer has in flight.
double gradient_bytes(const Training& training, bool experts);

/// Returns the bytes of a layer's input, which full recomputation keeps.
double input_bytes(const Training& training);

/// Returns the micro-batches of which the first pipeline stage holds activations, counted in whole
/// models' layers: with 1F1B as many layers as the model has (Korthikanti et al., section 4.2.3).
double layers_in_flight(const Training& training);

/// Returns the bytes of logits and their loss on one rank.
double loss_bytes(const Training& training);

}  // namespace ziggurat
