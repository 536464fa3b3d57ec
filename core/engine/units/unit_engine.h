// SPDX-License-Identifier: Apache-2.0
// core/engine/units/unit_engine.h: the hand of a trainer that computes with parameters which the
// engine brings to a device, unit by unit. Private to the engine.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/engine/state/state_door.h"
#include "core/engine/units/trainer_calls.h"
#include "core/schedule/gradients/gradient_flow.h"
#include "core/schedule/optimizer/speculation.h"
#include "core/schedule/params/home_gather.h"
#include "core/schedule/params/residency.h"

namespace ziggurat {

class UnitEngine final : public StateDoor<Engine>, private Hand {
 public:
  UnitEngine(const ModelSpec& model, const EngineConfig& config, Runtime& runtime, Device& device);
  ~UnitEngine() override { close(); }

  /// Do the rest of construction: all of it that can fail for reasons outside the program.
  void open(const Initializer& initialize);
  void open(StateSource& source, const LoadOptions& options);
  /// For a conversion of a store: notes for description(), and the store's new directories.
  TrainingState& state() noexcept { return state_; }

  // What the calls below do on the reactor's thread, for a trainer that runs there
  // (engine_tasks.h): one at a time.
  Task<> opening(const Initializer& initialize);
  /// Returns when the last copy is queued.
  Task<Residency::Acquired> acquired(UnitId unit);
  void released(UnitId unit, const Event& read);
  Task<GradientFlow::Accumulator> accumulator(UnitId unit);
  /// Sends the gradient on its way after `added`: then the trainer has added everything to the
  /// accumulator.
  Task<> finished_gradient(UnitId unit, Event added);
  Task<> announced(const StepOptions& options);
  Task<StepResult> stepped(const StepOptions& options);
  /// Returns what the unit's parameters are, given where they are.
  TypedDeviceSpan<const std::byte> typed(UnitId unit, DeviceSpan<const std::byte> params) const {
    return {state_.table().dtype(unit), params};
  }

  TypedDeviceSpan<const std::byte> acquire(UnitId unit, StreamRef& stream) override;
  void release(UnitId unit, StreamRef& stream) override;
  DeviceSpan<float> gradient(UnitId unit, StreamRef& stream) override;
  void finish_gradient(UnitId unit, StreamRef& stream) override;
  void prepare_step(const StepOptions& options) override;
  StepResult step(const StepOptions& options) override;
  std::size_t master_chunks(UnitId unit) const override;
  MasterChunk read_master(UnitId unit, std::size_t chunk) override;

 private:
  // Hand
  void validate() override { state_.validate_storeless(); }
  void plan_device() override;
  Homes make_homes(Context& context, const std::vector<StripePlace>& places) override;
  Task<> build() override;
  bool make_masters(ChunkId chunk, std::span<float> masters) const override;
  void opened() override;
  void updated(UnitId unit, std::uint64_t generation) override;
  void begin_generation(std::uint64_t generation) override;
  Task<> quiesce() override { co_await residency_->quiesce(); }
  bool in_step() const override;
  void destroy_parts() override;

  Task<std::unique_ptr<UnitGather>> make_gather();
  Task<> clear_frozen(UnitId unit);
  Task<> send_gradient(UnitId unit, Event added);
  void finish_now(UnitId unit);

  // unit_step.cc
  void require_checkpoint(const StepOptions& options) const;
  Task<StepResult> finish_step(const StepOptions& options);
  Task<> finish_frozen();
  Task<> settle_optional();
  Task<std::vector<bool>> have_gradients();
  Task<> finish_optional(UnitId unit, bool anywhere);
  Task<StepVerdict> judged(const StepOptions& options);
  Task<StepVerdict> judge_step(const StepOptions& options);
  std::optional<Error> objection_to_gradients() const;
  std::optional<Error> refusal_of_announced(const StepOptions& options) const;
  Task<> undo_step();
  bool may_guess() const;

  const Initializer* initialize_ = nullptr;  // set while the engine is opened
  DevicePlan device_plan_;
  std::optional<TrainerCalls> calls_;
  UnitParamHome* params_ = nullptr;  // the state's
  UnitGradHome* grads_ = nullptr;    // the state's
  std::unique_ptr<Residency> residency_;
  std::unique_ptr<GradientFlow> flow_;
  std::unique_ptr<HomeGather> home_gather_;  // used in stages 1 and 2
  std::optional<StepOptions> announced_;     // options of prepare_step(), without the blob
  std::vector<GroupStep> announced_groups_;
  std::optional<StepScalars> guess_;  // for the step under way, if updates start before its end
  SpeculationWatch watch_;
};

}  // namespace ziggurat
