// SPDX-License-Identifier: Apache-2.0
// core/engine/state/training_state.h: what outlives any trainer: one rank's part of the store, the
// table of chunks, the pool, the records and their sweep, seals, saves, recovery, the ranks'
// agreement, and the state by name.
//
// It knows no trainer. A hand (hand.h) holds one, tells it that gradients are ready and that a step
// begins, is made or is undone, and does the blocking calls of its trainer. A conversion of a store
// uses it without a hand. Private to the engine. Tasks run on the reactor. Other calls may come
// from the trainer's thread, which has a turn (state_door.h), so that nothing runs meanwhile that
// changes what they read.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aio/aligned_bytes.h"
#include "core/checkpoint/blob_header.h"
#include "core/checkpoint/load_options.h"
#include "core/checkpoint/state_loader.h"
#include "core/checkpoint/steps_blob.h"
#include "core/engine/engine.h"
#include "core/engine/state/background_save.h"
#include "core/engine/state/hand.h"
#include "core/engine/state/piece_copy.h"
#include "core/engine/state/record_copies.h"
#include "core/engine/state/state_service.h"
#include "core/engine/state/step_agreement.h"
#include "core/engine/state/storage.h"
#include "core/plan/device_plan.h"
#include "core/plan/host_plan.h"
#include "core/plan/node_plan.h"
#include "core/schedule/context.h"
#include "core/schedule/homes/grad_sums.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/rank_channels.h"
#include "core/schedule/unit_gates.h"
#include "core/schedule/unit_uses.h"
#include "core/sharding/strategy.h"

namespace ziggurat {

class TrainingState {
 public:
  /// Whether the ranks divide one model, or each rank has pieces of its own (of a model that its
  /// trainer has divided), which are divided with no other rank.
  enum class Division { kModel, kPieces };

  /// `device` is null if the hand brings nothing to one.
  TrainingState(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                Device* device, Division division);
  TrainingState(const TrainingState&) = delete;
  TrainingState& operator=(const TrainingState&) = delete;

  /// Opens or creates the state for `hand`, which must live until close() has ended. The state is
  /// created from `source` if there is one. After an error it has ended, and the other ranks know.
  Task<> open(Hand& hand, StateSource* source, LoadOptions options);
  /// Ends everything that waits, awaits what is under way, and destroys the parts, those that use
  /// others first.
  Task<> close();

  // state_open.cc: of a state that is opened without a hand
  /// Opens the communicators. Every opening begins so, in whatever way it goes on, so that ranks
  /// that differ in their settings find it out by agree_on_settings().
  void open_channels();
  void open_storage();
  /// Finishes what an earlier conversion of the store left unfinished, before a store is looked
  /// for.
  Task<> end_succession();
  /// Whether any rank has a store on its drives: then all ranks open one.
  Task<bool> store_found();
  void close_storage();
  /// Notes that the store's files were renamed into `directories`.
  void moved(const std::vector<std::string>& directories);

  // What a hand works with: the table from Hand::plan_device() on, the sweep from Hand::opened()
  // on, the other parts from Hand::build() on.
  const ModelSpec& model() const noexcept { return model_; }
  ModelSpec& model() noexcept { return model_; }
  const EngineConfig& config() const noexcept { return config_; }
  Runtime& runtime() const noexcept { return runtime_; }
  Device& device() const noexcept { return *device_; }
  bool has_device() const noexcept { return device_ != nullptr; }
  const Place& place() const noexcept { return place_; }
  const ChunkTable& table() const noexcept { return *table_; }
  Context& context() noexcept { return *context_; }
  Storage& storage() noexcept { return *storage_; }
  RecordHome& records() noexcept { return *records_; }
  OptimizerSweep& sweep() noexcept { return *sweep_; }
  const OptimizerSweep& sweep() const noexcept { return *sweep_; }
  UnitGates& gates() noexcept { return *gates_; }
  StateWrites& writes() noexcept { return *writes_; }
  std::uint64_t generation() const noexcept { return generation_; }
  std::vector<std::string>& notes() noexcept { return notes_; }
  /// Adds a note that parameters come from other ranks in int8, and with what error.
  void describe_quantized_params();
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  const Roundings& rounding() const noexcept { return rounding_; }
  ReductionSettings reduction() const;
  Sharding sharding() const;
  DeviceRequest device_request() const;
  /// Whether the CPU cannot reach the memory of the device.
  bool out_of_reach() const { return device_ != nullptr && !device_->host_accessible(); }

  // state_end.cc
  /// Throws the error with which the state has ended, if it has.
  void check() const { cancel_.check(); }
  /// Whether the state has ended. Any thread.
  bool has_ended() const noexcept { return ended_; }
  /// Makes every later call throw `error`, and wakes everything that waits.
  void fail(std::exception_ptr error);
  /// Runs a call of the trainer. If the call finds that the device is lost, the run ends, and the
  /// other ranks are told why.
  template <class T>
  Task<T> ending_the_run(Task<T> call) {
    std::exception_ptr error;
    try {
      co_return co_await std::move(call);
    } catch (const Error& failure) {
      error = std::current_exception();
      if (failure.code() != ErrorCode::kUnavailable) std::rethrow_exception(error);
    }
    fail(error);
    std::rethrow_exception(error);
  }
  /// Runs the call of a trainer that may lend memory. If the state has ended, throws only when no
  /// job reads or writes lent memory, or will ever do so: then the trainer may free it.
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
  /// Runs a part of opening a store. Every rank ends it at the same place. If it ends on a rank
  /// because no generation is undamaged, and on no rank for another reason, all ranks throw
  /// StoreLost.
  Task<> unless_lost(Task<> part);
  /// Throws if a rank has closed its engine. The ranks can then agree on nothing more, so this
  /// engine has ended too.
  void require_all_open(const char* call);

  // state_ranks.cc
  /// Compares settings with the other ranks, as the first call of all that is opened. If they
  /// differ, every rank throws the same kInvalidArgument, which names ranks and values.
  Task<> agree_on_settings();

  // state_validate.cc
  /// Checks all settings, the hand's last, and finds this rank's place and strategy.
  void validate();
  /// Throws if there is no store but the settings need one. Without a store parameters can only be
  /// read, so all of them must be frozen.
  void validate_storeless() const;

  // state_step.cc
  /// Notes that a call of the trainer changes the state, so that the other ranks may wait for it.
  void begin_call() noexcept { at_rest_ = false; }
  /// Returns the step's scalars, one for each parameter group. Group 0 has the parameters that are
  /// in no group. `grad_scale` multiplies the gradients.
  StepScalars scalars(const StepOptions& options, float grad_scale) const;
  /// Returns the number by which gradients are divided. They are the sum over the ranks, times the
  /// loss scale, but the step needs the mean. The division is part of the step's scalars, so that
  /// no value is rounded once more.
  double gradient_divisor(const StepOptions& options) const;
  /// Returns why this rank will not make a step with `options`; none if it will.
  std::optional<Error> refusal_of(const StepOptions& options) const;
  std::optional<Error> refusal_of_blob(std::span<const std::byte> blob) const;
  /// Returns this rank's facts about the step that is being made.
  StepFacts facts(const StepOptions& options) const;
  /// Exchanges `messages`, one of each rank, of one size and side by side, and judges the step by
  /// their facts. Of this rank's message all but the facts is there. Either every rank finds an
  /// objection, or none does.
  Task<StepVerdict> agree(StepFacts own, const std::optional<Error>& refusal,
                          std::span<std::byte> messages);
  /// Notes on the reactor that an agreement is under way, so that it ends if a rank that has closed
  /// its engine will never come to it.
  class Agreeing {
   public:
    explicit Agreeing(TrainingState& state) noexcept : state_(state) {
      ++state_.begun_.calls;
      state_.agreeing_ = true;
    }
    ~Agreeing() { state_.agreeing_ = false; }
    Agreeing(const Agreeing&) = delete;
    Agreeing& operator=(const Agreeing&) = delete;

   private:
    TrainingState& state_;
  };
  /// Makes the step: every gradient has arrived, and all ranks have agreed to it. `blob` becomes
  /// durable with it, or is given later if `blob_follows`. With `checkpoint`, stores it if its
  /// records are in memory.
  void end_step(const StepScalars& steps, std::span<const std::byte> blob, bool blob_follows,
                bool checkpoint);
  /// Undoes the step, so that the state is as before the step's first gradient. If that fails, the
  /// state ends and is given to nobody.
  Task<> undo_step();
  /// Throws while the newest step waits for its blob.
  void require_blob_given(const char* call) const;
  /// Gives the blob of the newest step, if require_blob() does not throw: that throws
  /// kInvalidArgument if no blob is awaited, or if it is too long.
  void give_blob(std::span<const std::byte> blob);
  void require_blob(std::span<const std::byte> blob) const;
  /// How many steps each trained parameter has made, as a run that resumes finds it; empty without
  /// EngineConfig::counts_steps. The step being made takes new ones; that returns those before.
  const std::vector<std::uint64_t>& counts() const noexcept { return counts_; }
  std::vector<std::uint64_t> take_counts(std::vector<std::uint64_t> counts) noexcept {
    return std::exchange(counts_, std::move(counts));
  }
  /// Returns the numbers of steps on which the rounding of parameters in `generation` depends.
  /// `generation` must be the newest, or the one being made.
  ParamSteps steps_in(std::uint64_t generation) const {
    ParamSteps steps{.generation = generation};
    if (table_->rounding()) steps.own = counts_;
    return steps;
  }

  // state_durable.cc
  /// Any thread.
  std::uint64_t durable_generation() const;
  /// StateEngine::make_durable(), if require_durable() does not throw.
  Task<> make_durable();
  void require_durable() const;
  /// Waits for the checkpoint under way, after which records may change again.
  Task<> checkpoint_ended();

  // state_saves.cc
  void require_saves(const char* call) const;
  /// Begins to save the newest step.
  void begin_save(const CheckpointRequest& request);
  Task<> save_checkpoint(const CheckpointRequest& request);
  Task<> finish_saves();
  bool saves_hang() const noexcept { return saves_ && saves_->hangs(); }
  std::vector<SaveOutcome> ended_saves();
  StateKind copied_state(bool widen_codes) const {
    return copied_kind(table_->state(), widen_codes);
  }
  /// Begins to copy the newest step. Errors: kInvalidArgument while another copy is under way.
  Task<std::shared_ptr<StateCopy>> begin_copy(CopyOptions options);
  /// Returns the line of history to which the states belong. Any thread.
  StateLine line() const;

  // state_by_name.cc
  /// Returns the index of `name` among the optimizer's arrays. Errors: kInvalidArgument.
  std::size_t state_index(const char* call, std::string_view piece, std::string_view name) const;
  /// Reads array `index` of a parameter that the trainer lends, at generation(), as written since.
  Task<> read_state(ParamId param, std::size_t index, std::span<float> values);
  Task<> write_state(ParamId param, std::size_t index, std::span<const float> values);
  /// Returns a chunk's masters without padding.
  Task<std::vector<float>> read_master(ChunkId chunk);

  // state_serve.cc
  /// The pieces of a rank, and the index of each by name.
  struct Pieces {
    std::vector<RankPiece> all;
    std::unordered_map<std::string_view, std::size_t> places;
  };
  /// Returns the pieces of `rank`. The caller has a turn: nobody else asks meanwhile.
  const Pieces& known_pieces(int rank) const;
  /// Reads array `state` of another rank's piece.
  Task<> read_state_of(int rank, std::uint64_t piece, std::size_t state, std::span<float> values);

  // state_lent.cc
  /// Where a parameter that the trainer lends is among the units.
  struct LentPlace {
    UnitId unit;
    std::size_t param;    ///< number in its unit
    std::uint64_t begin;  ///< first element in the unit's flat parameters
    std::uint64_t count;
  };
  const LentPlace& lent_place(ParamId param) const { return lent_places_[param]; }
  std::size_t lent_count() const noexcept { return lent_places_.size(); }
  /// How many of them are stored. These come first.
  std::size_t stored_count() const noexcept { return stored_params_; }
  const ParamSpec& lent_param(ParamId param) const {
    const LentPlace& place = lent_places_[param];
    return model_.units[place.unit].params[place.param];
  }
  /// Notes that a streamed parameter was brought home as its trainer has written it. Before the
  /// first step its values are its masters from now on, whoever asks for them.
  void param_stored(ParamId param) {
    if (generation_ == 0 && param < stored_params_) given_.insert(param);
  }
  /// Waits until no other rank reads the unit of a parameter. None does while the result lives.
  Task<UnitUses::Use> writing(ParamId param) { return uses_.write(lent_places_[param].unit); }
  /// Waits while the trainer writes a parameter of the unit. It writes none while the result lives.
  Task<UnitUses::Use> reading(UnitId unit) { return uses_.read(unit); }
  /// The runs of a parameter's elements, chunk by chunk.
  std::vector<ChunkRun> lent_runs(ParamId param) const;
  /// Returns those of a chunk, if its unit is packed.
  std::vector<ParamRun> packed_runs(ChunkId id) const {
    return table_->is_packed(table_->chunk(id).unit) ? table_->param_runs(id)
                                                     : std::vector<ParamRun>();
  }

  // What is asked about an open engine. Any thread.
  bool resumed() const noexcept { return resumed_ || loaded_; }
  std::span<const std::byte> resumed_blob() const noexcept { return resumed_blob_; }
  double state_seconds() const noexcept { return state_seconds_; }
  const HostPlan& plan() const noexcept { return plan_; }
  Account host_account() const { return pool_ ? pool_->account() : Account(0); }

 private:
  /// Memory for a chunk while the store is made or read.
  struct ItemMemory {
    Lease lease{};  ///< empty for a record that the CPU can reach where it stays
    WorkMemory work{};
  };
  bool of_pieces() const noexcept { return division_ == Division::kPieces; }

  // state_validate.cc
  void require_slots(const StoreState& state) const;
  void check_identity(const StoreState& state);

  // state_open.cc
  Task<> open_all();
  Task<> open_store();
  Task<> open_stored();
  Task<> make_table();
  bool keeps_store() const;
  bool trains() const;
  bool leaves_host_budget() const;
  void choose_host_budget(const ChunkTable& table);
  Task<> create_store();
  void choose_placement_if_automatic();
  void make_pool();
  void make_context();
  Task<> build_floors();
  Task<> create_state();
  Task<bool> seals_its_beginning();
  Task<> create_chunk(ChunkId id, StripedStore* store);
  Task<> fill_homes();
  Task<> fill_home(ChunkId id);
  std::size_t chunks_at_once() const;
  void make_sweep();
  StateHomes homes() const { return {*params_, *grads_, *records_}; }
  Task<Lease> state_lease(ChunkId id, std::uint64_t size_bytes);
  Task<ItemMemory> item_of(ChunkId id);
  Task<> make_params(ChunkId id, ParamSteps steps, std::span<const std::byte> record,
                     const WorkMemory& work);
  Task<> take_record(ChunkId id, const WorkMemory& work);
  void read_counts();
  void report_progress(ChunkId id, const char* what);

  // state_load.cc
  Task<> load_state();
  Task<> settle(std::vector<RecordDamage> damaged, bool& stands);
  Task<> load_chunk(ChunkId id, std::vector<RecordDamage>& damaged);
  Task<bool> look_at_record(std::span<std::byte> record, RecordDamage& damage);
  Task<bool> load_record(std::span<std::byte> record, RecordDamage& damage);
  void read_blob(const StoreState& state);

  // state_repair.cc
  std::vector<int> ranks_with_copies() const;
  std::string copies_elsewhere() const;
  Task<std::vector<RecordCopies::Repair>> plan_repairs(std::vector<RecordDamage>& damaged);
  Task<> repair_records(const std::vector<RecordCopies::Repair>& repairs);
  Task<> give_copy(const RecordCopies::Repair& repair);
  Task<> take_copy(const RecordCopies::Repair& repair);

  // state_notes.cc
  void describe();
  void describe_records();
  std::string durability() const;
  void describe_nodes();
  void describe_ranks();
  void describe_quantization();
  std::string sent_types() const;

  // state_ranks.cc
  void find_place();
  std::vector<std::pair<std::string, std::string>> shared_facts() const;
  int shard_group() const;
  NodeGrid exchanges() const;
  void validate_quantization(const Strategy& strategy) const;
  void tell_ranks(const std::exception_ptr& error) noexcept;
  Task<std::exception_ptr> first_cause(std::exception_ptr followed);

  // state_end.cc
  bool awaited_by_ranks() const;
  void end_by(const std::exception_ptr& error);

  // state_lent.cc
  Task<> choose_lent_placement_if_automatic(std::optional<std::string> layout);
  void pack(const std::optional<std::string>& layout);
  void require_places(const std::string& layout) const;
  Task<std::vector<float>> values_at_home(ChunkId id, ParamRun run);
  Task<PieceCopy::Written> given_masters();
  bool is_made_from_params(const ChunkRun& its) const;
  Task<> make_records();

  // state_by_name.cc
  /// The record of a packed unit that was read last, because the parameters in it are read one by
  /// one.
  struct LastRead {
    ChunkId chunk;
    std::uint64_t generation;
    std::shared_ptr<const std::vector<std::byte>> record;
  };
  /// A record, and the memory that holds it.
  struct NewestRecord {
    ItemMemory memory{};
    std::shared_ptr<const std::vector<std::byte>> read{};
    std::shared_ptr<const AlignedBytes> made{};
    std::span<const std::byte> bytes{};
  };
  Task<NewestRecord> newest_record(ChunkId id);
  Task<> read_run(ChunkId id, std::size_t index, ParamRun run, std::span<float> values);

  // state_serve.cc
  std::vector<RankPiece> own_pieces() const;
  std::unique_ptr<StateService> make_service();
  Task<> serve_state(std::uint64_t piece, std::uint64_t state, const StateService::Give& give);
  void rank_closed(int rank, const StateService::Begun& begun);

  // state_durable.cc
  bool checkpoint_due() const;
  void begin_checkpoint();
  Task<> store_checkpoint(std::uint64_t generation, std::vector<std::byte> blob);
  void note_not_stored(std::uint64_t generation, const std::exception_ptr& failure) const;

  // state_saves.cc
  void open_saves();
  SaveState save_state() const;
  StateContent content(const CheckpointRequest& request) const;
  void begin_line();
  std::optional<StateLine> line_seen() const;
  void begin_load();

  // state_step.cc
  void begin_generation();
  Error undo_failed(const std::exception_ptr& cause) const;
  Betas betas_of(const StepOptions& options) const;
  bool makes_step(const GroupStep& group) const;
  bool groups_fit(const StepOptions& options) const;
  std::string groups_text(const StepOptions& options) const;
  static StepScalars scalars_of(std::span<const GroupStep> groups,
                                OptimizerStep::Settings settings);
  std::uint64_t blob_room_bytes() const noexcept {
    return config_.blob_bytes_max +
           (config_.counts_steps ? StepsBlob::head_bytes(stored_count()) : 0);
  }
  std::uint64_t blob_bytes_max() const;

  ModelSpec model_;
  EngineConfig config_;
  Division division_;
  Place place_;  // place among the ranks; known from validate() on
  // The strategy of config_ on these ranks; known from validate() on.
  std::optional<Strategy> strategy_;
  Runtime& runtime_;
  Device* device_;
  Hand* hand_ = nullptr;  // null in a state that is used without a hand

  std::unique_ptr<RankChannels> channels_;
  std::unique_ptr<StateService> service_;  // serves the pieces of several ranks
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<RecordCopies> copies_;  // made only when a record is damaged
  std::optional<ChunkTable> table_;
  HostPlan plan_;
  NodePlan node_plan_;
  std::unique_ptr<PinnedPool> pool_;
  std::unique_ptr<Stream> to_device_;
  std::unique_ptr<Stream> to_host_;
  std::unique_ptr<Compute> compute_;
  CancelScope cancel_;               // cancelled when the state has failed or is closed
  std::atomic<bool> ended_ = false;  // cancel_ is cancelled; read by the trainer's thread
  LentMemory lent_memory_;
  std::optional<WorkGroup> tasks_;
  std::optional<WorkGroup> local_tasks_;  // of which no other rank knows
  std::optional<UnitGates> gates_;
  std::optional<Context> context_;
  std::unique_ptr<ParamHome> params_;
  std::unique_ptr<GradHome> grads_;
  std::unique_ptr<RecordHome> records_;
  std::unique_ptr<DeviceStaging> staging_;
  std::optional<StateWrites> writes_;  // used if ranks have pieces of their own
  std::unique_ptr<OptimizerSweep> sweep_;

  std::unique_ptr<RecordCopier> copier_;   // used by saves and copies
  std::shared_ptr<PieceCopy> copy_;        // the newest one
  std::optional<WorkGroup> copying_;       // its task, for which no other rank waits
  std::unique_ptr<BackgroundSave> saves_;  // used with EngineConfig::Checkpoint::saves
  std::vector<SaveOutcome> ended_saves_;   // saves that nobody has asked for yet
  StateSource* source_ = nullptr;          // set while the state is opened from a source
  LoadOptions load_options_;
  std::unique_ptr<StateLoader> loader_;  // set while the state is made from source_

  // The pieces of ranks that were asked about; they do not change.
  mutable std::map<int, Pieces> pieces_;
  std::uint64_t generation_ = 0;
  Roundings rounding_;  // the store's rounding, or the config's if the store allows a choice
  std::vector<std::uint64_t> counts_;   // by ParamSpec::lent
  std::vector<LentPlace> lent_places_;  // by ParamSpec::lent
  std::size_t stored_params_ = 0;
  std::set<ParamId> given_;  // streamed parameters that were written before the first step
  UnitUses uses_{cancel_};   // by other ranks, and by the trainer who writes
  bool unsealed_ = false;    // the store has no generation yet when the state is made
  bool unmade_ = false;      // the first sweep makes the records that do not stay in memory
  std::optional<LastRead> last_read_;
  double state_seconds_ = 0;
  std::vector<std::byte> last_blob_;     // blob of generation_, with the engine's header
  std::optional<BlobLine> line_record_;  // set if the line does not belong to the store's own uuid
  LineId own_line_;                      // used in place of a store's uuid if there is no store
  StateService::Begun begun_;            // by this rank
  bool agreeing_ = false;                // an agreement is under way
  bool blob_awaited_ = false;            // generation_ still needs its blob
  bool checkpoint_awaits_ = false;       // a checkpoint also waits for the blob
  std::vector<std::byte> resumed_blob_;
  bool resumed_ = false;
  bool loaded_ = false;          // the state was loaded from a source, with its step
  std::size_t group_count_ = 0;  // number of groups of the model's parameters
  bool storing_ = false;         // a checkpoint is being stored in the background, the newest begun
  Signal stored_;                // set when that checkpoint has ended
  Nanoseconds stored_at_{0};     // when the last one ended, by the reactor's clock
  bool at_rest_ = false;         // no call was made since make_durable()
  bool closing_ = false;         // the other ranks know, and need nothing more
  std::uint64_t opened_bytes_ = 0;  // progress of create_state() and load_state()
  std::vector<std::string> notes_;
};

}  // namespace ziggurat
