// SPDX-License-Identifier: Apache-2.0
// core/engine/lent_tasks.h: the calls of LentEngine as coroutines, for a trainer that runs on the
// reactor itself: one in virtual time, whose memory does not exist
// (core/rehearsal/lent_rehearsal.h).
//
// They are the calls of lent_engine.h, which says what each does, with the same errors; the
// blocking calls wait for the same coroutines. A trainer's work is ordered by events in place of
// streams. One call at a time; reactor's thread only. A reference that a call is given must outlive
// its await.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/runtime/reactor.h"
#include "core/engine/lent_engine.h"
#include "tiers/device/event.h"
#include "tiers/pool/account.h"

namespace ziggurat {

class LentTasks {
 public:
  /// Begins an engine; open() comes next. A store that is there is not resharded. `device` may be
  /// null if no parameter is streamed.
  static std::unique_ptr<LentTasks> create(const ModelSpec& model, EngineConfig config,
                                           Runtime& runtime, Device* device);
  virtual ~LentTasks() = default;  ///< close() has returned, or open() has thrown

  virtual Task<> open(std::span<const TypedSpan<std::byte>> params) = 0;

  /// Returns what happens when the unit's parameters are on the device: who computes there waits
  /// for all of it.
  virtual Task<std::vector<Event>> acquire(StreamedUnit unit) = 0;
  /// `read` happens when the trainer has read the parameters for the last time.
  virtual void release(StreamedUnit unit, const Event& read) = 0;
  virtual Task<> wait_updated(ParamId param) = 0;
  virtual Task<> wait_all_updated() = 0;

  virtual Task<> expect_gradients() = 0;
  virtual Task<> add_gradient(ParamId param, TypedSpan<const std::byte> values, float scale,
                              bool instead_of_zeros) = 0;
  virtual Task<StepResult> step(std::span<const TypedSpan<const std::byte>> gradients,
                                const StepOptions& options) = 0;
  virtual Task<> make_durable() = 0;
  virtual Task<> close() = 0;

  virtual Account host_account() const = 0;
  virtual std::vector<std::string> description() const = 0;
};

}  // namespace ziggurat
