// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/lent_rehearsal.h: plays a training run of a trainer that lends its memory
// (core/engine/lent_engine.h) in virtual time, from a recording of one of its steps.
//
// It is what rehearsal.h says, with LentEngine in place of Engine: the trainer's memory does not
// exist either. The trainer has threads of its own, which on a machine that computes on its cores
// (RehearsedMachine::workers_compute) share them with the engine's workers. Streamed parameters
// have values when the engine is opened. One rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/rehearsal/rehearsal.h"

namespace ziggurat {

/// What a trainer does next in a step.
struct LentEvent {
  enum class Kind : std::uint8_t {
    kCompute,      ///< for `seconds`
    kAcquire,      ///< brings the unit `of`, and waits until it is there
    kRelease,      ///< lets it go
    kWait,         ///< waits until parameter `of` is that of the newest step
    kGradient,     ///< lends the gradient of parameter `of` to the step to come
    kAddGradient,  ///< adds a gradient of parameter `of` to its sum on NVMe
    kStep,         ///< makes the step
  };
  Kind kind = Kind::kCompute;
  std::uint32_t of = 0;
  double seconds = 0;  ///< of kCompute, on cores that do nothing else
  /// How many of the trainer's threads compute; 0 for as many as there are workers.
  std::size_t threads = 0;
};

struct LentRehearsal {
  ModelSpec model;  ///< as LentEngine::open() takes it
  /// As a run would have it. Its directories are only names: nothing is made there.
  EngineConfig config{};
  RehearsedMachine machine{};
  std::vector<LentEvent> events{};  ///< of each step
  int steps = 4;
  /// The type of gradients that are lent to the step, where it is not their parameter's, as that of
  /// sums may be. What is added to sums on NVMe has its parameter's.
  std::optional<DType> gradients = std::nullopt;
  bool update_at_once = false;  ///< StepOptions::update_at_once
};

/// Plays the run, and returns what the rank did. A wait for a parameter (kWait) counts as one for a
/// unit. Errors: those of the engine, as a run would get them; kInvalidArgument for a recording
/// that makes no step, or names what the model does not have.
RehearsedRank rehearse_lent(const LentRehearsal& request);

}  // namespace ziggurat
