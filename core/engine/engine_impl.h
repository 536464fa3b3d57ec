// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_impl.h: the engine on one rank. It owns the parts below it and joins their
// pipelines into steps.
#pragma once

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/checkpoint/blob_header.h"
#include "core/checkpoint/state_loader.h"
#include "core/engine/background_save.h"
#include "core/engine/lent_engine.h"
#include "core/engine/record_copies.h"
#include "core/engine/state_service.h"
#include "core/engine/step_agreement.h"
#include "core/engine/storage.h"
#include "core/engine/trainer_calls.h"
#include "core/plan/device_plan.h"
#include "core/plan/host_plan.h"
#include "core/plan/node_plan.h"
#include "core/schedule/context.h"
#include "core/schedule/gradients/gradient_flow.h"
#include "core/schedule/homes.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/optimizer/speculation.h"
#include "core/schedule/params/home_gather.h"
#include "core/schedule/params/param_cache.h"
#include "core/schedule/rank_channels.h"
#include "core/sharding/strategy.h"

namespace ziggurat {

class Resharding;

class EngineImpl final : public LentEngine {
 public:
  EngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime, Device& device);
  /// Constructs an engine for LentEngine::open(); nothing is on the device.
  EngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
             std::unique_ptr<Device> device, std::span<const TypedSpan<std::byte>> lent);
  ~EngineImpl() override;

  /// For EngineConfig::Resume::kReshard: returns an engine over the converted store; null if there
  /// is no store, or one that needs no conversion.
  static std::unique_ptr<EngineImpl> reshard(const ModelSpec& model, const EngineConfig& config,
                                             Runtime& runtime, Device& device);

  /// Does the rest of construction: all of it that can fail for reasons outside the program.
  void open(const Initializer& initialize);
  void open(StateSource& source, const LoadOptions& options);

  TypedDeviceSpan<const std::byte> acquire(UnitId unit, StreamRef& stream) override;
  void release(UnitId unit, StreamRef& stream) override;
  DeviceSpan<float> gradient(UnitId unit, StreamRef& stream) override;
  void finish_gradient(UnitId unit, StreamRef& stream) override;
  using Engine::finish_gradient;
  void prepare_step(const StepOptions& options) override;
  StepResult step(const StepOptions& options) override;

  std::uint64_t generation() const override {
    const Turn turn(turn_);
    return generation_;
  }
  std::uint64_t durable_generation() const override;
  void make_durable() override;
  void save_checkpoint(const CheckpointRequest& request) override;
  void finish_saves() override;
  bool saves_hang() const override;
  std::vector<SaveOutcome> ended_saves() override;
  bool resumed() const override { return resumed_ || loaded_; }
  std::span<const std::byte> resumed_blob() const override { return resumed_blob_; }
  void read_master(
      UnitId unit,
      const std::function<void(std::uint64_t, std::span<const float>)>& consume) override;
  Placement placement() const override { return config_.placement; }
  double state_seconds() const override { return state_seconds_; }
  std::uint64_t read_ahead_bytes() const override { return plan_.items * plan_.item_bytes; }
  std::uint64_t kept_record_bytes() const override { return plan_.kept_bytes; }
  const Metrics& metrics() const override { return runtime_.metrics; }
  Account host_account() const override { return pool_->account(); }
  std::vector<std::string> description() const override;
  StateLine line() const override;

  // engine_lend.cc
  StepResult step(std::span<const TypedSpan<const std::byte>> gradients,
                  const StepOptions& options) override;
  void refuse_step(const Error& why) override;
  void lend_params(UnitId unit, TypedSpan<std::byte> params) override;
  void expect_gradients() override;
  void wait_updated(UnitId unit) override;
  void wait_all_updated() override;
  void give_blob(std::span<const std::byte> blob) override;
  bool has_ended() const noexcept override { return ended_; }
  void check() override;

  // engine_state.cc
  std::vector<std::string> state_names() const override;
  void read_state(UnitId unit, std::string_view name, std::span<float> values) override;
  void write_state(UnitId unit, std::string_view name, std::span<const float> values) override;
  std::optional<Roundings> rounding() const override { return table_->rounding(); }
  StateKind copied_state(bool widen_codes) const override;
  void copy_state(bool widen_codes, const TakeArray& take) override;

  // engine_serve.cc
  std::vector<Piece> pieces_of(int rank) const override;
  void read_state_of(int rank, std::string_view piece, std::string_view name,
                     std::span<float> values) override;

 private:
  /// Serializes a trainer's calls. It is recursive, because a function that is given values
  /// (read_master()) may make calls too.
  using Turn = std::lock_guard<std::recursive_mutex>;

  /// Memory for a chunk while the store is made or read.
  struct ItemMemory {
    Lease lease{};  ///< empty for a record that the CPU can reach where it stays
    WorkMemory work{};
  };

  // engine_validate.cc
  void validate();
  void validate_storeless() const;
  void require_slots(const StoreState& state) const;
  void check_identity(const StoreState& state);

  // engine_open.cc
  Task<> open_on_reactor(const Initializer& initialize);
  Task<bool> store_found();
  Task<> open_store();
  Task<> open_stored();
  void choose_placement_if_automatic();
  Task<> build_floors();
  ParamCacheLimits cache_limits() const;
  DeviceRequest device_request() const;
  Task<> create_state(const Initializer& initialize);
  Task<> create_chunk(ChunkId id, const Initializer& initialize);
  std::size_t chunks_at_once() const;
  void make_sweep();
  StateHomes homes() const { return {*params_, *grads_, *records_}; }
  Task<Lease> state_lease(ChunkId id, std::uint64_t size_bytes);
  Task<ItemMemory> item_of(ChunkId id);
  Task<> take_record(ChunkId id, const WorkMemory& work);
  void count_steps();
  std::uint64_t steps_of(UnitId unit, std::uint64_t generation) const;
  void report_progress(ChunkId id, const char* what);

  // engine_load.cc
  Task<> load_state();
  Task<> settle(std::vector<RecordDamage> damaged, bool& stands);
  Task<> load_chunk(ChunkId id, std::vector<RecordDamage>& damaged);
  Task<bool> look_at_record(std::span<std::byte> record, RecordDamage& damage);
  Task<bool> load_record(std::span<std::byte> record, RecordDamage& damage);
  void read_blob(const StoreState& state);

  // engine_repair.cc
  std::vector<int> ranks_with_copies() const;
  std::string copies_elsewhere() const;
  Task<std::vector<RecordCopies::Repair>> plan_repairs(std::vector<RecordDamage>& damaged);
  Task<> repair_records(const std::vector<RecordCopies::Repair>& repairs);
  Task<> give_copy(const RecordCopies::Repair& repair);
  Task<> take_copy(const RecordCopies::Repair& repair);

  void unit_updated(UnitId unit, std::uint64_t generation);

  // engine_notes.cc
  void describe();
  void describe_records();
  std::string durability() const;
  void describe_nodes();
  void describe_ranks();
  void describe_quantization();

  // engine_reshard.cc
  friend class Resharding;
  Task<> end_succession();

  // engine_ranks.cc
  void find_place();
  Task<> agree_on_settings();
  Task<> set_gather_region_aside();
  ReductionSettings reduction() const;
  NodeGrid exchanges() const;
  void validate_quantization(const Strategy& strategy) const;
  /// Returns how many ranks share one copy of the state, if there are several copies; else 0.
  int shard_group() const { return strategy_->is_hybrid() ? strategy_->shard_group : 0; }
  Sharding sharding() const {
    Sharding its = Sharding::of(*strategy_, place_.data);
    its.quantization = config_.quantization;
    its.ranks_per_node = config_.ranks_per_node;
    its.tensor = {.rank = place_.tensor, .ranks = place_.tensor_ranks()};
    return its;
  }
  void tell_ranks(const std::exception_ptr& error) noexcept;
  Task<std::exception_ptr> first_cause(std::exception_ptr followed);
  Task<> unless_lost(Task<> part);

  // engine.cc
  Task<> close();
  template <class T>
  Task<T> ending_the_run(Task<T> call);
  void wait_on(StreamRef& stream, const Event& event);
  bool awaited_by_ranks() const;
  Task<> clear_frozen(UnitId unit);
  Task<> send_gradient(UnitId unit, Event added);
  Task<> read_master_chunk(ChunkId id, std::vector<float>& values);
  void fail(std::exception_ptr error);

  // engine_lend.cc
  /// Runs the call of a trainer that lends memory. If the engine has ended, throws only when no job
  /// reads or writes lent memory, or will ever do so: then the trainer may free it.
  template <class T>
  T run_lent(Task<T> call) {
    return runtime_.reactor.block_on(giving_back(std::move(call)));
  }
  template <class T>
  Task<T> giving_back(Task<T> call) {
    std::exception_ptr error;
    try {
      co_return co_await std::move(call);
    } catch (...) {
      error = std::current_exception();
    }
    if (cancel_.cancelled()) co_await lent_memory_.idle();
    std::rethrow_exception(error);
  }
  bool is_lent() const noexcept { return config_.placement.params == Tier::kTrainer; }
  void validate_lent();
  void require_not_lent(const char* call) const;
  void require_lent(UnitId unit, const char* call, std::uint64_t count) const;
  void widen_params(ChunkId id, std::span<float> masters) const;
  void require_blob_given(const char* call) const;
  void take_counts(std::span<const TypedSpan<const std::byte>> gradients,
                   std::span<const std::byte> blob);
  Task<> updated_from_memory();
  std::optional<Error> lent_refusal(std::span<const TypedSpan<const std::byte>> gradients,
                                    const StepOptions& options) const;
  Task<bool> agree_on_lent_step(const StepOptions& options, const std::optional<Error>& refusal);
  Task<StepResult> finish_lent_step(std::span<const TypedSpan<const std::byte>> gradients,
                                    const StepOptions& options);

  // engine_state.cc
  void require_updated(const char* call, UnitId unit) const;
  std::size_t state_index(const char* call, std::string_view piece, std::string_view name) const;
  std::size_t require_state(const char* call, UnitId unit, std::string_view name,
                            std::uint64_t count) const;
  Task<std::span<const std::byte>> newest_record(ChunkId id, ItemMemory& memory,
                                                 std::vector<std::byte>& written);
  Task<> read_state_chunk(ChunkId id, std::size_t index, std::span<float> values);
  Task<> copy_chunk(ChunkId id, bool widen_codes, const TakeArray& take);

  // engine_serve.cc
  /// The pieces of a rank, and the index of each by name.
  struct Pieces {
    std::vector<Piece> all;
    std::unordered_map<std::string_view, std::size_t> places;
  };
  const Pieces& known_pieces(int rank) const;
  std::vector<Piece> own_pieces() const;
  std::unique_ptr<StateService> make_service();
  Task<> serve_state(std::uint64_t piece, std::uint64_t state, const StateService::Give& give);
  void rank_closed(int rank, std::uint64_t steps);
  void require_all_open(const char* call);

  // engine_durable.cc
  bool checkpoint_due() const;
  void begin_checkpoint();
  Task<> store_checkpoint(std::uint64_t generation, std::vector<std::byte> blob);
  void note_not_stored(std::uint64_t generation, const std::exception_ptr& failure) const;
  Task<> checkpoint_ended();

  // engine_checkpoint.cc
  void open_saves();
  void begin_save(const CheckpointRequest& request);
  SaveState save_state() const;
  StateContent content(const CheckpointRequest& request) const;
  void begin_line();
  std::optional<StateLine> line_seen() const;
  void require_saves(const char* call) const;
  void begin_load();

  // engine_step.cc
  Task<StepResult> finish_step(const StepOptions& options);
  Task<StepVerdict> judged(const StepOptions& options);
  Task<StepVerdict> judge_step(const StepOptions& options);
  Task<StepVerdict> agree(StepFacts own, const std::optional<Error>& refusal,
                          std::span<std::byte> messages);
  StepFacts facts(const StepOptions& options) const;
  std::optional<Error> objection_to_gradients();
  std::optional<Error> refusal_of(const StepOptions& options) const;
  std::optional<Error> refusal_of_blob(std::span<const std::byte> blob) const;
  Task<> undo_step();
  Error undo_failed(const std::exception_ptr& cause) const;
  void begin_step();
  bool may_guess() const;
  Betas betas_of(const StepOptions& options) const;
  double gradient_divisor(const StepOptions& options) const;
  bool makes_step(const GroupStep& group) const;
  bool groups_fit(const StepOptions& options) const;
  std::string groups_text(const StepOptions& options) const;
  StepScalars scalars(const StepOptions& options, float grad_scale) const;
  static StepScalars scalars_of(std::span<const GroupStep> groups,
                                OptimizerStep::Settings settings);
  std::uint64_t blob_bytes_max() const;

  ModelSpec model_;
  EngineConfig config_;
  Place place_;  // place among the ranks; known from validate() on
  // The strategy of config_ on these ranks; known from validate() on.
  std::optional<Strategy> strategy_;
  Runtime& runtime_;
  std::unique_ptr<Device> own_device_;  // used if the trainer lends its memory
  Device& device_;

  std::unique_ptr<RankChannels> channels_;
  std::unique_ptr<StateService> service_;  // serves lent pieces among several ranks
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<RecordCopies> copies_;  // made only when a record is damaged
  std::optional<ChunkTable> table_;
  HostPlan plan_;
  DevicePlan device_plan_;
  NodePlan node_plan_;
  std::unique_ptr<PinnedPool> pool_;
  std::unique_ptr<Stream> to_device_;
  std::unique_ptr<Stream> to_host_;
  std::unique_ptr<Compute> compute_;
  CancelScope cancel_;               // cancelled when the engine has failed or is closed
  std::atomic<bool> ended_ = false;  // cancel_ is cancelled; read by the trainer's thread
  LentMemory lent_memory_;
  std::optional<WorkGroup> tasks_;
  std::optional<UnitGates> gates_;
  std::optional<Context> context_;
  std::unique_ptr<ParamHome> params_;
  std::unique_ptr<GradHome> grads_;
  std::unique_ptr<RecordHome> records_;
  std::unique_ptr<DeviceStaging> staging_;
  std::unique_ptr<ParamCache> cache_;  // null if a trainer lends its parameters
  std::unique_ptr<GradientFlow> flow_;
  std::unique_ptr<HomeGather> home_gather_;  // used in stages 1 and 2
  std::optional<StateWrites> writes_;        // used if a trainer lends its parameters
  std::unique_ptr<OptimizerSweep> sweep_;

  std::unique_ptr<BackgroundSave> saves_;  // used with EngineConfig::Checkpoint::saves
  std::vector<SaveOutcome> ended_saves_;   // saves that nobody has asked for yet
  StateSource* source_ = nullptr;          // set while the engine is opened from a source
  LoadOptions load_options_;
  std::unique_ptr<StateLoader> loader_;  // set while the state is made from source_

  mutable std::recursive_mutex turn_;
  // The pieces of ranks that were asked about; they do not change.
  mutable std::map<int, Pieces> pieces_;
  std::vector<TypedSpan<std::byte>> lent_params_;  // per unit, as lent at open
  std::optional<TrainerCalls> calls_;
  std::uint64_t generation_ = 0;
  Roundings rounding_;  // the store's rounding, or the config's if the store allows a choice
  std::vector<std::uint64_t> own_steps_;  // per unit, as the trainer's blob counts; or empty
  double state_seconds_ = 0;
  std::vector<std::byte> last_blob_;     // blob of generation_, with the engine's header
  std::optional<BlobLine> line_record_;  // set if the line does not belong to the store's own uuid
  LineId own_line_;                      // used in place of a store's uuid if there is no store
  std::uint64_t agreements_ = 0;         // number of agreements on steps that this rank has begun
  bool agreeing_ = false;                // an agreement is under way
  bool blob_awaited_ = false;            // generation_ still needs its blob
  bool checkpoint_awaits_ = false;       // a checkpoint also waits for the blob
  std::vector<std::byte> resumed_blob_;
  bool resumed_ = false;
  bool loaded_ = false;                   // the state was loaded from a source, with its step
  std::size_t group_count_ = 0;           // number of groups of the model's parameters
  std::optional<StepOptions> announced_;  // options of prepare_step(), without the blob
  std::vector<GroupStep> announced_groups_;
  std::optional<StepScalars> guess_;  // for the step under way, if updates start before its end
  SpeculationWatch watch_;
  bool storing_ = false;            // a checkpoint is being stored in the background
  Signal stored_;                   // set when that checkpoint has ended
  Nanoseconds stored_at_{0};        // when the last one ended, by the reactor's clock
  bool at_rest_ = false;            // no call was made since make_durable()
  std::uint64_t opened_bytes_ = 0;  // progress of create_state() and load_state()
  std::vector<std::string> notes_;
};

}  // namespace ziggurat
