// SPDX-License-Identifier: Apache-2.0
// core/engine/units/unit_tasks.cc: passes a trainer's calls on the reactor on to the engine of
// units.
#include <utility>

#include "core/engine/engine_tasks.h"
#include "core/engine/units/unit_engine.h"

namespace ziggurat {
namespace {

class UnitTasks final : public EngineTasks {
 public:
  UnitTasks(const ModelSpec& model, const EngineConfig& config, Runtime& runtime, Device& device)
      : engine_(model, config, runtime, device) {}

  Task<> open(const Initializer& initialize) override { return engine_.opening(initialize); }

  Task<Acquired> acquire(UnitId unit) override {
    Task<Residency::Acquired> acquiring = engine_.acquired(unit);
    Residency::Acquired its = co_await std::move(acquiring);
    co_return Acquired{.params = engine_.typed(unit, its.params), .landed = std::move(its.landed)};
  }
  void release(UnitId unit, const Event& read) override { engine_.released(unit, read); }

  Task<Gradient> gradient(UnitId unit) override {
    Task<GradientFlow::Accumulator> taking = engine_.accumulator(unit);
    GradientFlow::Accumulator its = co_await std::move(taking);
    co_return Gradient{.values = its.values, .zeroed = std::move(its.zeroed)};
  }
  Task<> finish_gradient(UnitId unit, Event added) override {
    return engine_.finished_gradient(unit, std::move(added));
  }

  Task<> prepare_step(const StepOptions& options) override { return engine_.announced(options); }
  Task<StepResult> step(const StepOptions& options) override { return engine_.stepped(options); }
  Task<> make_durable() override {
    engine_.state().require_durable();
    return engine_.state().make_durable();
  }
  Task<> close() override { return engine_.closing(); }

  Account host_account() const override { return engine_.host_account(); }
  std::vector<std::string> description() const override { return engine_.description(); }

 private:
  UnitEngine engine_;
};

}  // namespace

std::unique_ptr<EngineTasks> EngineTasks::create(const ModelSpec& model, const EngineConfig& config,
                                                 Runtime& runtime, Device& device) {
  return std::make_unique<UnitTasks>(model, config, runtime, device);
}

}  // namespace ziggurat
