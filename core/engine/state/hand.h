// SPDX-License-Identifier: Apache-2.0
// core/engine/state/hand.h: what the state of an engine must have from the hand that trains it.
//
// A hand brings parameters to its trainer, takes the trainer's gradients, and says when a step is
// made. The state knows no trainer: it asks the hand only for what follows. Private to the engine.
// Reactor's thread only, if nothing else is said.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/runtime/async.h"
#include "core/schedule/context.h"
#include "core/schedule/homes/grad_home.h"
#include "core/schedule/homes/param_home.h"
#include "core/sharding/chunk_table.h"

namespace ziggurat {

class Hand {
 public:
  virtual ~Hand() = default;

  // While the state is opened, in this order.
  /// Checks the settings that concern the hand, and what the trainer gave. Errors:
  /// kInvalidArgument.
  virtual void validate() = 0;
  /// Divides the device's memory, before a new store is made. Errors: kResourceExhausted.
  virtual void plan_device() {}
  /// The homes of parameters and gradients, which the state keeps.
  struct Homes {
    std::unique_ptr<ParamHome> params;
    std::unique_ptr<GradHome> grads;
  };
  /// Makes the homes. `places` are for files on NVMe.
  virtual Homes make_homes(Context& context, const std::vector<StripePlace>& places) = 0;
  /// Makes the hand's own parts. The homes are there.
  virtual Task<> build() { co_return; }
  /// Fills the masters of a chunk of a new state, without its padding. Returns false, and leaves
  /// zeros, if the trainer has given none yet. Any thread.
  virtual bool make_masters(ChunkId chunk, std::span<float> masters) const = 0;
  /// The state is whole, and this rank's part of its parameters is at home.
  virtual void opened() {}

  // While it trains.
  /// Notes that this rank's part of `unit` is at home at `generation`.
  virtual void updated(UnitId unit, std::uint64_t generation) = 0;
  /// Begins the step after `generation`. The gates have begun it already.
  virtual void begin_generation(std::uint64_t) {}
  /// Waits until nothing is under way in which other ranks take part.
  virtual Task<> quiesce() { co_return; }
  /// Whether a step was begun in which other ranks will wait for this rank.
  virtual bool in_step() const { return false; }

  // While it is closed.
  /// Waits for what the hand brings, if no other rank takes part in that. The state has not failed.
  virtual Task<> end_loads() { co_return; }
  /// Destroys the hand's own parts. Nothing is under way any more.
  virtual void destroy_parts() {}
};

}  // namespace ziggurat
