// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/step_time.h: how long a step takes: compute from shapes, exchanges from
// bytes and links, bubbles of pipelines, the update wherever it runs.
//
// A matrix product takes its operations over what the machine's products reach, in whole waves of
// tiles (128 x 256 elements, one a processor); all else takes the bytes that it reads and writes
// over what memory reaches. A layer that is shorter than the host's work to start it takes that
// instead. A pipeline takes m times its slowest stage, and once each of the others (Narayanan et
// al. 2021, section 2.2). Beside the prediction is the bound: the largest of the resources' own
// times, which no schedule can beat. Pure functions; any thread.
#pragma once

#include <string>
#include <vector>

#include "core/plan/machines/machine.h"
#include "core/plan/strategies/training.h"

namespace ziggurat {

/// A part of a step that is not hidden beneath another.
struct TimeLine {
  std::string what;
  double seconds = 0;
};

/// What moves in a step, and what it may hide beneath.
struct Flow {
  std::string what;
  double seconds = 0;
  double compute = 0;     ///< seconds of compute meanwhile; 0 if all waits for it
  double waits = 0;       ///< seconds meanwhile in which compute itself waits for another flow
  std::string meanwhile;  ///< "forward"; empty if all waits for it
  bool of_pass = false;   ///< hidden by tokens of a micro-batch; if not, of a step
  /// Returns what it adds to the step.
  double exposed() const noexcept;
  /// Returns from how many tokens on it adds nothing, if it meets `tokens`; 0 if no number helps.
  double hidden_from(double tokens) const noexcept;
};

struct StepTime {
  std::vector<TimeLine> lines;  ///< add up to `seconds`
  std::vector<Flow> flows;      ///< what of `lines` is no compute, with what is hidden of it
  double seconds = 0;
  std::vector<TimeLine> busy;  ///< how long each resource works in a step, hidden or not
  double bound = 0;            ///< no schedule is faster: the busiest of them
  std::string binds;           ///< the resource of the bound
};

/// Predicts a step on nodes of `machine`, whose ranks are numbered with tensor ranks innermost,
/// then data, then pipeline ranks.
StepTime step_time(const Training& training, const Machine& machine);

/// The seconds of one layer's forward and backward on one rank, of one micro-batch, without any
/// exchange, and at least what the host needs to start it.
struct LayerTime {
  double forward = 0;
  double backward = 0;
  double again = 0;  ///< what backward makes again of forward
};
LayerTime layer_time(const Training& training, const Machine& machine, bool experts);
/// Returns the bytes that it counts, for a token, of what a dense layer has beside products and
/// attention, in forward and backward together.
double kernel_bytes(const ModelShape& model);

/// Returns the seconds of the head and its loss, forward and backward.
double head_time(const Training& training, const Machine& machine);

/// Returns how long an all-reduce of `bytes` takes among `ranks`, of which `per_node` share a node,
/// if `rings` such exchanges share each node's network.
double all_reduce_time(const Training& training, const Machine& machine, double bytes, int ranks,
                       int per_node, int rings);

}  // namespace ziggurat
