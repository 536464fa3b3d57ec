// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_tasks.cc: passes a trainer's calls on the reactor on to the engine of lent
// memory.
#include "core/engine/lent_tasks.h"

#include <thread>
#include <utility>

#include "core/engine/lent/lent_engine_impl.h"

namespace ziggurat {
namespace {

class TasksOfLent final : public LentTasks {
 public:
  TasksOfLent(const ModelSpec& model, const EngineConfig& config, Runtime& runtime, Device* device)
      : engine_(model, config, runtime, device) {}

  Task<> open(std::span<const TypedSpan<std::byte>> params) override {
    return engine_.opening(params, nullptr, {});
  }

  Task<std::vector<Event>> acquire(StreamedUnit unit) override {
    engine_.begin_acquire(unit);
    return engine_.acquired(unit, std::this_thread::get_id(), Acquire::kUse);
  }
  void release(StreamedUnit unit, const Event& read) override {
    StreamedParams& its = engine_.begin_release(unit);
    its.release(unit, read);
  }
  Task<> wait_updated(ParamId param) override { return engine_.param_updated(param); }
  Task<> wait_all_updated() override { return engine_.all_updated(); }

  Task<> expect_gradients() override { return engine_.gradients_expected(); }
  Task<> add_gradient(ParamId param, TypedSpan<const std::byte> values, float scale,
                      bool instead_of_zeros) override {
    return engine_.gradient_added(param, values, scale, instead_of_zeros);
  }
  Task<StepResult> step(std::span<const TypedSpan<const std::byte>> gradients,
                        const StepOptions& options) override {
    return engine_.finish_step(gradients, options);
  }
  Task<> make_durable() override {
    engine_.state().require_durable();
    return engine_.state().make_durable();
  }
  Task<> close() override { return engine_.closing(); }

  Account host_account() const override { return engine_.host_account(); }
  std::vector<std::string> description() const override { return engine_.description(); }

 private:
  LentEngineImpl engine_;
};

}  // namespace

std::unique_ptr<LentTasks> LentTasks::create(const ModelSpec& model, EngineConfig config,
                                             Runtime& runtime, Device* device) {
  config.speculation = EngineConfig::Speculation::kNever;  // as LentEngine::open() has it
  return std::make_unique<TasksOfLent>(model, config, runtime, device);
}

}  // namespace ziggurat
