// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_engine_impl.h: the hand of a trainer that lends its own parameters and
// gradients. Private to the engine.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/checkpoint/steps_blob.h"
#include "core/engine/lent/streamed_params.h"
#include "core/engine/lent_engine.h"
#include "core/engine/state/state_door.h"
#include "core/schedule/homes/grad_sums.h"

namespace ziggurat {

class LentEngineImpl final : public StateDoor<LentEngine>, private Hand {
 public:
  LentEngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                 Device* device);
  ~LentEngineImpl() override { close(); }
  /// Does the rest of construction. `source` may be null.
  void open(std::span<const TypedSpan<std::byte>> params, StateSource* source,
            const LoadOptions& options);
  /// For a conversion of a store: notes for description(), and the store's new directories.
  TrainingState& state() noexcept { return state_; }

  // What the calls below do on the reactor's thread, for a trainer that runs there
  // (lent_tasks.h): one at a time.
  Task<> opening(std::span<const TypedSpan<std::byte>> params, StateSource* source,
                 LoadOptions options);
  /// Notes that this thread is about to acquire or to release a unit. Errors: kInvalidArgument, and
  /// nothing was changed. acquired() follows, or StreamedParams::release().
  StreamedParams& begin_acquire(StreamedUnit unit);
  StreamedParams& begin_release(StreamedUnit unit);
  Task<std::vector<Event>> acquired(StreamedUnit unit, std::thread::id thread, Acquire why);
  Task<> param_updated(ParamId param);
  Task<> all_updated();
  Task<> gradients_expected();
  Task<> gradient_added(ParamId param, TypedSpan<const std::byte> values, float scale,
                        bool instead_of_zeros);
  Task<StepResult> finish_step(std::span<const TypedSpan<const std::byte>> gradients,
                               const StepOptions& options);

  std::uint64_t steps_of(ParamId param) const override;
  void set_steps(ParamId param, std::uint64_t steps) override;
  std::span<const std::byte> resumed_blob() const override { return resumed_steps().own; }
  std::uint64_t resumed_blob_ranks() const override { return resumed_steps().of_ranks; }
  void give_blob(std::span<const std::byte> blob) override;
  FromRanks from_ranks() const override {
    return streamed_ ? streamed_->from_ranks() : FromRanks{};
  }
  void add_gradient(ParamId param, TypedSpan<const std::byte> values, float scale,
                    bool instead_of_zeros) override;
  void discard_sum(ParamId param) override;
  void read_sum(ParamId param, std::uint64_t first, std::span<float> values) override;
  StepResult step(std::span<const TypedSpan<const std::byte>> gradients,
                  const StepOptions& options) override;
  void refuse_step(const Error& why) override;
  void acquire(StreamedUnit unit, StreamRef& stream) override {
    acquire(unit, stream, Acquire::kUse);
  }
  void acquire_aside(StreamedUnit unit, StreamRef& stream) override {
    acquire(unit, stream, Acquire::kAside);
  }
  void release(StreamedUnit unit, StreamRef& stream) override;
  void expect_units(std::span<const StreamedUnit> units) override;
  void end_waits() override;
  TypedDeviceSpan<std::byte> place(ParamId param) const override;
  void store_param(ParamId param, StreamRef& stream) override;
  void read_home(ParamId param, TypedSpan<std::byte> values) override;
  void write_home(ParamId param, TypedSpan<const std::byte> values) override;
  void lend_param(ParamId param, TypedSpan<std::byte> values) override;
  void expect_gradients() override;
  void wait_updated(ParamId param) override;
  void wait_all_updated() override;
  bool has_ended() const noexcept override { return state_.has_ended(); }
  void check() override;

  std::vector<std::string> state_names() const override;
  void read_state(ParamId param, std::string_view name, std::span<float> values) override;
  void write_state(ParamId param, std::string_view name, std::span<const float> values) override;
  std::optional<Roundings> rounding() const override { return state_.table().rounding(); }
  StateKind copied_state(bool widen_codes) const override {
    return state_.copied_state(widen_codes);
  }
  std::shared_ptr<StateCopy> begin_copy(const CopyOptions& options) override;
  std::vector<Piece> pieces_of(int rank) const override;
  void read_state_of(int rank, std::string_view piece, std::string_view name,
                     std::span<float> values) override;

 private:
  void acquire(StreamedUnit unit, StreamRef& stream, Acquire why);

  // Hand
  void validate() override;
  void plan_device() override;
  Task<> build() override;
  void begin_generation(std::uint64_t generation) override;
  Task<> end_loads() override;
  void destroy_parts() override;
  Homes make_homes(Context& context, const std::vector<StripePlace>& places) override;
  bool make_masters(ChunkId chunk, std::span<float> masters) const override;
  void updated(UnitId unit, std::uint64_t generation) override {
    state_.gates().at_home(unit, generation);
  }

  GradSums& sums(const char* call) const;
  bool has_gradient(std::span<const TypedSpan<const std::byte>> gradients, ParamId param) const;
  StreamedParams& streamed(const char* call) const;
  template <class Use>
  auto on_stream(const Use& use);
  void wait_for(StreamedUnit unit, const std::vector<Event>& landed, StreamRef& stream);
  StreamedParams& at_home(const char* call, ParamId param, TypedSpan<const std::byte> values) const;
  Task<> or_end(Task<> call);
  void require_streams(const ModelSpec& model) const;
  static void require_frozen_last(ModelSpec& model, std::size_t param);
  void require_param(const char* call, ParamId param) const;
  void require_param_or_whole(const char* call, ParamId param) const;
  void require_trained(const char* call, ParamId param) const;
  void require_count(const char* call, ParamId param, std::uint64_t count) const;
  std::size_t require_state(const char* call, ParamId param, std::string_view name,
                            std::uint64_t count) const;
  std::optional<Error> refusal_of(std::span<const TypedSpan<const std::byte>> gradients,
                                  const StepOptions& options) const;
  Task<bool> agree(const StepOptions& options, const std::optional<Error>& refusal);
  struct CountedStep {
    std::vector<std::uint64_t> steps;  ///< as the step leaves them
    std::vector<GroupStep> groups;
    std::vector<std::byte> blob;
    StepOptions options;  ///< views of the two above
  };
  CountedStep counted_step(std::span<const TypedSpan<const std::byte>> gradients,
                           const StepOptions& given) const;
  void take_counts(const std::vector<bool>& present, const std::vector<std::uint64_t>& counts);
  StepsBlob resumed_steps() const;
  void require_counts(const char* call, ParamId param) const;
  Task<> updated_from_memory();

  std::span<const TypedSpan<std::byte>> lent_;  // per parameter; set while the engine is opened
  std::unique_ptr<StreamedParams> streamed_;    // null if all parameters are lent
  std::unique_ptr<GradSums> sums_;              // null if gradients are not summed on NVMe
  GradHome* grads_ = nullptr;                   // the state's
  // How many steps each trained parameter has made, if they are counted. Between steps the trainer
  // may set other numbers, which the state takes with the next step.
  std::vector<std::uint64_t> steps_;
};

}  // namespace ziggurat
