// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/training.h: one training to be judged: a model, its batch, how it is
// divided, and what the trainer's software does beyond the formulas.
//
// Plain data. Every number that is not a formula's is in Software, once, with its source.
#pragma once

#include <cstdint>

#include "core/plan/models/model_shape.h"
#include "core/plan/strategies/layout.h"

namespace ziggurat {

enum class Recompute : std::uint8_t {
  kNothing,  ///< all that backward needs stays
  /// Attention's scores are made again (Korthikanti et al. 2022, section 5). With flash there are
  /// none: then all that needs no matrix product is made again, which is the outputs of norms and
  /// the MLP's product (torchtitan's "selective", Megatron's layernorm and mlp_act).
  kSelective,
  kFull  ///< only the input of each layer stays
};

/// What a trainer does that its layout does not tell.
struct Software {
  bool flash = true;             ///< attention without scores in memory
  bool dropout = false;          ///< a mask of a byte after attention, MLP and softmax
  bool norms_in_fp32 = false;    ///< a norm keeps its input in fp32, and its gradients are
  bool experts_in_fp32 = false;  ///< outputs of experts are weighed and added in fp32
  /// Bytes of a vocabulary entry and token in the loss: 16-bit logits and their gradient, fp32
  /// copy, log-softmax and its gradient (2 + 2 + 4 + 4 + 4), and 2 where logits are shifted by a
  /// copy.
  double loss_bytes = 16;
  std::int64_t loss_tokens = 0;  ///< tokens whose logits exist at once; 0 for all of a micro-batch
  double gathered_units = 2;  ///< layers whose parameters are whole at once, where they are divided
  double unreduced_bytes = 6;  ///< of a gathered parameter's gradient: in 16 bits, and to reduce
  double unreduced_head_bytes = 6;    ///< the same of the head's, which waits longest
  std::int64_t in_flight_layers = 2;  ///< inputs of layers on the device while they are offloaded
  double bucket_bytes = 0;            ///< of gradients on their way
  double swap_parameters = 1e9;       ///< brought from a drive at once: DeepSpeed's sub_group_size
  bool two_slots = false;             ///< state on a drive is written beside the last, not over it
  bool overlaps = true;               ///< exchanges run beside compute; if not, after it
  bool update_hides = false;          ///< an update on the host runs beneath the next forward
  /// Ranks meet in host memory: what is gathered or summed among them crosses each rank's link
  /// between host and device whole.
  bool staged = false;
  /// Ranks exchange each with each, through host memory and sockets, and not in rings: a node's
  /// network carries a byte once for each of the node's ranks that wants it.
  bool direct = false;
  bool vertical = false;  ///< all micro-batches of a layer before the next: one exchange a pass
  /// A layer that is computed again leaves out the product of its output, which backward does not
  /// need.
  bool leaves_out_last = false;

  /// Seconds that the host takes to start a layer's work. A shorter layer waits for it.
  double host_forward_layer_s = 0;
  double host_backward_layer_s = 0;
  double host_micro_batch_s = 0;  ///< embedding, head and loss of a micro-batch
  double collective_start_s = 0;  ///< before the first byte of a tensor-parallel sum moves
  bool last_stage_recomputes = true;
};

struct Training {
  ModelShape model;
  ParallelLayout layout;
  StateRecipe recipe;
  LoraTargets lora{};             ///< rank 0: all parameters are trained
  int lora_copies = 1;            ///< adapters that are held at once
  double frozen_param_bytes = 2;  ///< of a parameter that is not trained
  std::int64_t sequence = 2048;
  std::int64_t micro_batch = 1;
  std::int64_t micro_batches = 1;  ///< of a rank in a step
  Recompute recompute = Recompute::kNothing;
  bool offloads_activations = false;  ///< inputs of layers go to host memory
  Software software;

  std::int64_t tokens() const noexcept { return sequence * micro_batch; }
};

}  // namespace ziggurat
