// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_tasks.h: the calls of Engine as coroutines, for a trainer that runs on the
// reactor itself: one of a thousand ranks that share a reactor in virtual time
// (core/rehearsal/rehearsal.h).
//
// They are the calls of engine.h, which says what each does, with the same errors. A trainer's work
// is ordered by events in place of streams. One call at a time; reactor's thread only. A reference
// that a call is given must outlive its await.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/runtime/reactor.h"
#include "core/engine/engine.h"
#include "tiers/device/event.h"
#include "tiers/pool/account.h"

namespace ziggurat {

class EngineTasks {
 public:
  /// Begins an engine; open() comes next.
  static std::unique_ptr<EngineTasks> create(const ModelSpec& model, const EngineConfig& config,
                                             Runtime& runtime, Device& device);
  virtual ~EngineTasks() = default;  ///< close() has returned, or open() has thrown

  virtual Task<> open(const Initializer& initialize) = 0;

  struct Acquired {
    TypedDeviceSpan<const std::byte> params;
    Event landed;  ///< the parameters are there when it has happened
  };
  virtual Task<Acquired> acquire(UnitId unit) = 0;
  /// `read` happens when the trainer has read the parameters for the last time.
  virtual void release(UnitId unit, const Event& read) = 0;

  struct Gradient {
    DeviceSpan<float> values;
    Event zeroed;  ///< the values are zeros when it has happened, and may be added to
  };
  virtual Task<Gradient> gradient(UnitId unit) = 0;
  /// `added` happens when the trainer has added all of its gradient.
  virtual Task<> finish_gradient(UnitId unit, Event added) = 0;

  virtual Task<> prepare_step(const StepOptions& options) = 0;
  virtual Task<StepResult> step(const StepOptions& options) = 0;
  virtual Task<> make_durable() = 0;
  virtual Task<> close() = 0;

  virtual Account host_account() const = 0;
  virtual std::vector<std::string> description() const = 0;
};

}  // namespace ziggurat
