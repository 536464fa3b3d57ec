// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_checkpoint.cc: saves the engine's state while it trains, and loads state from
// elsewhere when it opens.
#include <fmt/format.h>

#include <random>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "core/engine/engine_impl.h"

namespace ziggurat {

void EngineImpl::open_saves() {
  if (!config_.checkpoint.saves) return;
  ZIGGURAT_CHECK(BackgroundSave::memory_bytes(*table_) == plan_.save_bytes,
                 "{} bytes for saves, {} planned", BackgroundSave::memory_bytes(*table_),
                 plan_.save_bytes);
  saves_ = std::make_unique<BackgroundSave>(BackgroundSave::Parts{.context = *context_,
                                                                  .runtime = runtime_,
                                                                  .records = *records_,
                                                                  .store = storage_->store.get(),
                                                                  .ranks = *channels_->saves,
                                                                  .settings = config_.checkpoint});
}

void EngineImpl::require_saves(const char* call) const {
  if (saves_) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: a checkpoint was requested, but the engine was opened without "
                  "EngineConfig::Checkpoint::saves, so no memory is set aside for checkpoints",
                  call));
}

SaveState EngineImpl::save_state() const {
  if (!saves_ || !saves_->under_way()) return SaveState::kNone;
  return saves_->given_up() ? SaveState::kGivenUp : SaveState::kUnderWay;
}

StateContent EngineImpl::content(const CheckpointRequest& request) const {
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

StateLine EngineImpl::line() const {
  if (!storage_ || !storage_->store) return line_of(line_record_, own_line_, 1);
  const StoreState& state = storage_->store->state();
  return line_of(line_record_, {state.uuid.high, state.uuid.low}, state.epoch);
}

/// Returns the line of a store that cannot be opened, if that much of the store can be read.
std::optional<StateLine> EngineImpl::line_seen() const {
  if (!storage_->store) return std::nullopt;
  const StoreState& state = storage_->store->state();
  const std::optional<UnwrappedBlob> its = unwrap_blob(state.blob);
  if (!its) return std::nullopt;
  return line_of(its->line, {state.uuid.high, state.uuid.low}, state.epoch);
}

/// Chooses the line of a state that is made now. It continues its source's line, is a child of it,
/// or is a new line.
void EngineImpl::begin_line() {
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

/// Begins to save the newest step.
void EngineImpl::begin_save(const CheckpointRequest& request) {
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

void EngineImpl::save_checkpoint(const CheckpointRequest& request) {
  const Turn turn(turn_);
  require_saves("save_checkpoint()");
  runtime_.reactor.block_on([](EngineImpl& self, const CheckpointRequest& wanted) -> Task<> {
    self.cancel_.check();
    co_await self.sweep_->settled();
    if (!self.saves_->hangs()) co_await self.saves_->ended();
    if (self.saves_->hangs()) {
      throw Error(ErrorCode::kDeadlineExceeded,
                  fmt::format("{}: no checkpoint can be saved while the previous one hangs",
                              wanted.folder));
    }
    std::vector<SaveOutcome> before = self.saves_->take_outcomes();
    self.begin_save(wanted);
    co_await self.saves_->ended();
    std::vector<SaveOutcome> outcomes = self.saves_->take_outcomes();
    self.ended_saves_.insert(self.ended_saves_.end(), before.begin(), before.end());
    if (outcomes.back().failure) {
      for (const std::string& note : outcomes.back().notes) log().warn("{}", note);
      throw Error(*outcomes.back().failure);
    }
    self.ended_saves_.push_back(outcomes.back());
  }(*this, request));
}

void EngineImpl::finish_saves() {
  const Turn turn(turn_);
  if (!saves_) return;
  runtime_.reactor.block_on(
      [](EngineImpl& self) -> Task<> { co_await self.saves_->ended(); }(*this));
}

bool EngineImpl::saves_hang() const {
  const Turn turn(turn_);
  if (!saves_) return false;
  return runtime_.reactor.block_on(
      [](const EngineImpl& self) -> Task<bool> { co_return self.saves_->hangs(); }(*this));
}

std::vector<SaveOutcome> EngineImpl::ended_saves() {
  const Turn turn(turn_);
  if (!saves_) return {};
  std::vector<SaveOutcome> outcomes = std::exchange(ended_saves_, {});
  runtime_.reactor.block_on([](EngineImpl& self, std::vector<SaveOutcome>& all) -> Task<> {
    for (SaveOutcome& outcome : self.saves_->take_outcomes()) all.push_back(std::move(outcome));
    co_return;
  }(*this, outcomes));
  return outcomes;
}

/// Prepares to make the state from source_, if there is one.
void EngineImpl::begin_load() {
  if (source_ == nullptr) return;
  loader_ = std::make_unique<StateLoader>(runtime_.reactor, *runtime_.workers, *table_, *source_,
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
