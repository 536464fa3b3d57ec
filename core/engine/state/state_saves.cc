// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_saves.cc: saves the engine's state while it trains, and loads state from
// elsewhere when it opens.
#include <fmt/format.h>

#include <random>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {

void TrainingState::open_saves() {
  if (!config_.checkpoint.saves && !of_pieces()) return;
  copier_ = std::make_unique<RecordCopier>(RecordCopier::Parts{
      .context = *context_, .records = *records_, .store = storage_->store.get()});
  if (of_pieces()) {
    copying_.emplace(runtime_.reactor);
    return;
  }
  ZIGGURAT_CHECK(BackgroundSave::memory_bytes(*table_) == plan_.save_bytes,
                 "{} bytes for saves, {} planned", BackgroundSave::memory_bytes(*table_),
                 plan_.save_bytes);
  saves_ = std::make_unique<BackgroundSave>(BackgroundSave::Parts{.context = *context_,
                                                                  .runtime = runtime_,
                                                                  .copier = *copier_,
                                                                  .ranks = *channels_->saves,
                                                                  .settings = config_.checkpoint});
}

void TrainingState::require_saves(const char* call) const {
  if (saves_) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: a checkpoint was requested, but the engine was opened without "
                  "EngineConfig::Checkpoint::saves, so no memory is set aside for checkpoints",
                  call));
}

SaveState TrainingState::save_state() const {
  if (!saves_ || !saves_->under_way()) return SaveState::kNone;
  return saves_->given_up() ? SaveState::kGivenUp : SaveState::kUnderWay;
}

StateContent TrainingState::content(const CheckpointRequest& request) const {
  const ChunkRuns runs(*table_);
  const Sharding& ranks = table_->sharding();
  std::vector<std::byte> blob;
  if (const auto its = unwrap_blob(last_blob_)) blob.assign(its->blob.begin(), its->blob.end());
  return {.model = model_.name,
          .dtype = model_.dtype,
          .state = table_->state(),
          .rounding = table_->rounding(),
          .units = runs.units(),
          .tensors = runs.tensors(),
          .step = generation_,
          .blob = std::move(blob),
          .run_identity = config_.run_identity,
          .numerics_fingerprint = config_.numerics_fingerprint,
          .layout = {.ranks = ranks.ranks(),
                     .tensor_parallel = ranks.tensor.ranks,
                     .zero_stage = ranks.stage,
                     .shard_group = ranks.world_size,
                     .placement = to_string(config_.placement)},
          .resume = request.resume,
          .versions = {{"manifest", fmt::format("{}", Manifest::kSchema)}},
          .line = line()};
}

StateLine TrainingState::line() const {
  if (!storage_ || !storage_->store) return line_of(line_record_, own_line_, 1);
  const StoreState& state = storage_->store->state();
  return line_of(line_record_, {state.uuid.high, state.uuid.low}, state.epoch);
}

/// Returns the line of a store that cannot be opened, if that much of the store can be read.
std::optional<StateLine> TrainingState::line_seen() const {
  if (!storage_->store) return std::nullopt;
  const StoreState& state = storage_->store->state();
  const std::optional<UnwrappedBlob> its = unwrap_blob(state.blob);
  if (!its) return std::nullopt;
  return line_of(its->line, {state.uuid.high, state.uuid.low}, state.epoch);
}

/// Chooses the line of a state that is made now. It continues its source's line, is a child of it,
/// or is a new line.
void TrainingState::begin_line() {
  std::random_device random;
  const auto draw = [&] { return (static_cast<std::uint64_t>(random()) << 32) | random(); };
  own_line_ = {draw(), draw()};
  if (!loaded_ || !source_->content().line) return;
  const StateLine& from = *source_->content().line;
  if (load_options_.continues_line) {
    line_record_ = continued(from);
    return;
  }
  line_record_ =
      BlobLine{.id = line().id, .parent = from.id, .left_at = generation_, .epochs_before = 0};
}

void TrainingState::begin_save(const CheckpointRequest& request) {
  const Communicator& ranks = *channels_->saves;
  const SavingRank rank{.rank = ranks.rank(),
                        .ranks = ranks.world_size(),
                        .replica = place_.data / table_->sharding().world_size};
  const ChunkRuns runs(*table_);
  BackgroundSave::Request save{.generation = generation_,
                               .stored = sweep_->storing(),
                               .rank = rank,
                               .checkpoint = {.folder = request.folder,
                                              .retention = {.keep_last = request.keep_last,
                                                            .keep_every = request.keep_every,
                                                            .keep_best = request.keep_best},
                                              .content = content(request),
                                              .plan = plan_shards(*table_, runs, rank)}};
  saves_->begin(std::move(save));
}

Task<> TrainingState::save_checkpoint(const CheckpointRequest& request) {
  cancel_.check();
  co_await sweep_->settled();
  if (!saves_->hangs()) co_await saves_->ended();
  if (saves_->hangs()) {
    throw Error(
        ErrorCode::kDeadlineExceeded,
        fmt::format("{}: no checkpoint can be saved while the previous one hangs", request.folder));
  }
  std::vector<SaveOutcome> before = saves_->take_outcomes();
  begin_save(request);
  co_await saves_->ended();
  std::vector<SaveOutcome> outcomes = saves_->take_outcomes();
  ended_saves_.insert(ended_saves_.end(), before.begin(), before.end());
  if (outcomes.back().failure) {
    for (const std::string& note : outcomes.back().notes) log().warn("{}", note);
    throw Error(*outcomes.back().failure);
  }
  ended_saves_.push_back(outcomes.back());
}

Task<std::shared_ptr<StateCopy>> TrainingState::begin_copy(CopyOptions options) {
  cancel_.check();
  if (copy_ && !copy_->has_ended()) {
    throw Error(ErrorCode::kInvalidArgument,
                "a save of this engine's state is under way: wait for its end first");
  }
  PieceCopy::Written given = co_await given_masters();
  if (generation_ == 0) co_await make_records();
  PieceCopy::Written written;
  for (ChunkId id = 0; id < table_->chunks().size(); ++id) {
    if (!writes_->of(id)) continue;
    // What was written before the step belongs to its record.
    co_await sweep_->record_written(id, generation_);
    if (auto its = writes_->of(id)) written.emplace(id, std::move(its));
  }
  for (auto& [id, masters] : given) {
    StateWrites::Arrays arrays = *masters;
    if (const auto its = writes_->of(id)) arrays.insert(its->begin(), its->end());
    written[id] = std::make_shared<const StateWrites::Arrays>(std::move(arrays));
  }
  copy_ = std::make_shared<PieceCopy>(
      PieceCopy::Parts{.context = *context_, .copier = *copier_, .tasks = *copying_}, generation_,
      sweep_->storing(), std::move(written), options);
  co_return copy_;
}

Task<> TrainingState::finish_saves() {
  if (saves_) co_await saves_->ended();
}

std::vector<SaveOutcome> TrainingState::ended_saves() {
  std::vector<SaveOutcome> outcomes = std::exchange(ended_saves_, {});
  if (!saves_) return outcomes;
  for (SaveOutcome& outcome : saves_->take_outcomes()) outcomes.push_back(std::move(outcome));
  return outcomes;
}

/// Prepares to make the state from source_, if there is one.
void TrainingState::begin_load() {
  if (source_ == nullptr) return;
  loader_ = std::make_unique<StateLoader>(runtime_.reactor, runtime_.jobs(), *table_, *source_,
                                          load_options_, config_.optimizer.initial_accumulator);
  for (const std::string& note : loader_->notes())
    notes_.push_back(fmt::format("{}: {}", source_->place(), note));
  if (load_options_.weights_only) return;
  generation_ = loader_->step();
  loaded_ = true;
  const std::vector<std::byte>& blob = source_->content().blob;
  if (blob.size() > blob_bytes_max()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: the trainer's blob has {} bytes, but the store has room for only {}",
                    source_->place(), blob.size(), blob_bytes_max()));
  }
  resumed_blob_ = blob;
}

}  // namespace ziggurat
