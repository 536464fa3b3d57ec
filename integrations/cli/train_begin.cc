// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_begin.cc: finds what a run of `ziggurat train` goes on from: its store, a
// checkpoint, weights, or initial values.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/hf_config.h"
#include "integrations/cli/lost_store.h"
#include "integrations/cli/store_paths.h"
#include "integrations/cli/train_run.h"

namespace ziggurat::cli {
namespace {

/// Returns the best step in a manifest's "best_metric"; none if the manifest is older and does not
/// have it.
std::optional<BestStep> best_of(const StateContent& content) {
  const auto found = content.resume.find("best_metric");
  if (found == content.resume.end()) return std::nullopt;
  const nlohmann::json best = nlohmann::json::parse(found->second, nullptr, false);
  const bool known = best.is_object() && best.contains("step") && best.contains("value") &&
                     best["step"].is_number_unsigned() && best["value"].is_number();
  if (!known) return std::nullopt;
  return BestStep{best["step"].get<std::uint64_t>(), best["value"].get<double>()};
}

/// Makes the folder and, for a moment, a file in it, so that a failure shows now and not at the
/// first save, hours later. A folder in which another process is just saving is no failure.
void try_folder(Runtime& runtime, const std::string& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) throw system_error(failure.value(), "the directory cannot be made");
  runtime.reactor.block_on([](Runtime& its, const std::string& in) -> Task<> {
    const auto io = its.io_engine(its.reactor, in);
    io->close(io->open(in, {.writable = true, .direct = false, .unnamed = true}));
    try {
      lock_checkpoints({.reactor = its.reactor, .io = *io}, in, std::chrono::milliseconds(0));
    } catch (const Error& error) {
      if (error.native() != EWOULDBLOCK) throw;
    }
    co_return;
  }(runtime, folder));
}

}  // namespace

/// Opens the folder of checkpoints before the engine, so that a run that cannot save checkpoints
/// ends at once.
void TrainRun::open_checkpoints() {
  const std::string& folder = options_.checkpoint.directory;
  if (folder.empty()) return;
  std::array<char, 512> own{};
  if (ranks_->first()) {
    try {
      try_folder(*runtime_, folder);
    } catch (const Error& error) {
      const std::string why = error.what();
      std::copy_n(why.begin(), std::min(why.size(), own.size() - 1), own.begin());
    }
  }
  if (const std::string why = ranks_->all(own).front().data(); !why.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("no checkpoint can be saved in --checkpoint-dir {}: {}; give a "
                            "directory that can be written, or leave --checkpoint-dir out",
                            folder, why));
  }
  const NewestCheckpoint::Differs differs = [this](const CheckpointFacts& its) {
    return run_difference(its.run_identity, its.ranks, its.tensor_parallel);
  };
  checkpoints_ = std::make_unique<NewestCheckpoint>(*runtime_, *ranks_, console_, folder, differs);
}

/// Opens the engine from the store, or from a newer checkpoint of its line of history. If the store
/// is lost, opens it from the newest checkpoint of that line that verifies.
void TrainRun::open_engine() {
  open_checkpoints();
  const auto here = static_cast<std::uint8_t>(store_exists(options_.engine.store));
  const std::vector<std::uint8_t> stored = ranks_->all(here);
  if (options_.engine.resume == EngineConfig::Resume::kNever ||
      std::ranges::count(stored, 0) == std::ssize(stored)) {
    begin_engine();
  } else {
    std::optional<StoreLost> lost;
    try {
      engine_ = Engine::open(gpt::make_spec(model_), engine_config(), *runtime_, *device_,
                             gpt::make_initializer(model_, options_.seed));
    } catch (const StoreLost& error) {
      if (!checkpoints_) throw;
      lost = error;
    }
    if (lost) {
      replace_lost_store(*lost);
    } else {
      go_on_from_newer();
    }
  }
  if (checkpoints_) checkpoints_->say_others(engine_->line());
}

/// Opens the engine without the state of a store: from --load, from the newest checkpoint, or with
/// initial values.
void TrainRun::begin_engine() {
  const CheckpointOptions& from = options_.checkpoint;
  if (!from.load.empty()) {
    LoadOptions options{.weights_only = from.load_weights, .renames = from.load_rename};
    if (from.load_partial) options.initialize = gpt::make_initializer(model_, options_.seed);
    return begin_from(from.load, options);
  }
  const EngineConfig::Resume resume = options_.engine.resume;
  const bool goes_on =
      resume == EngineConfig::Resume::kAuto || resume == EngineConfig::Resume::kReshard;
  if (goes_on && checkpoints_) {
    if (const auto newest = checkpoints_->newest({})) {
      console_.line(
          fmt::format("there is no store in {}, so the run goes on from {}, the newest checkpoint "
                      "that verifies (--resume never begins a new run)",
                      options_.store, newest->directory));
      return begin_from(newest->directory, {.continues_line = newest->continues_line});
    }
  }
  engine_ = Engine::open(gpt::make_spec(model_), engine_config(), *runtime_, *device_,
                         gpt::make_initializer(model_, options_.seed));
}

void TrainRun::begin_from(const std::string& path, const LoadOptions& options) {
  const bool weights_only = options.weights_only;
  CheckpointFiles files(*runtime_, path);
  if (const SafetensorsSource* weights = files.weights(); weights != nullptr) {
    if (!weights_only) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--load {} has weights but no optimizer state; give --load-weights "
                              "too to begin training at step 0",
                              path));
    }
    if (!weights->config().empty())
      require_hf_config(weights->config(), options_.model, path + "/config.json");
  } else if (!weights_only) {
    require_same_run(files.source().content(), path);
    best_ = best_of(files.source().content());
    note_loaded(files.source());
  }
  console_.line(
      fmt::format("loading {}{}", weights_only ? "the weights of " : "", files.source().place()));
  EngineConfig config = engine_config();
  if (replaces_store_) config.resume = EngineConfig::Resume::kNever;
  engine_ =
      Engine::open(gpt::make_spec(model_), config, *runtime_, *device_, files.source(), options);
}

/// Remembers that the folder of checkpoints has the loaded step already, in case the run ends where
/// it began.
void TrainRun::note_loaded(const StateSource& source) {
  const std::filesystem::path folder = std::filesystem::path(source.place()).parent_path();
  std::error_code ignored;
  if (checkpoints_ && std::filesystem::equivalent(folder, options_.checkpoint.directory, ignored)) {
    saved_step_ = source.content().step;
  }
}

/// Goes on from a checkpoint that is newer than the store, if there is one. With the optimizer's
/// state in memory, a store is as old as the last time that it was written; and a store may have
/// lost its newest step.
void TrainRun::go_on_from_newer() {
  if (!checkpoints_) return;
  const StateLine line = engine_->line();
  const std::uint64_t step = engine_->generation();
  const auto newer = checkpoints_->newer(line, step);
  if (!newer) return;
  console_.line(
      fmt::format("the store {} is at step {}, so the run goes on from {}, a newer state of the "
                  "same line of history ({})",
                  options_.store, step, newer->directory, short_text(line.id)));
  engine_->make_durable();  // after this the ranks may part
  ranks_->part();
  engine_->close();
  engine_.reset();
  replaces_store_ = true;
  begin_from(newer->directory, {.continues_line = newer->continues_line});
}

/// Replaces a lost store, and keeps all of its files (see lost_store.h). Every rank must call it.
void TrainRun::replace_lost_store(const StoreLost& lost) {
  const std::vector<StoreDirectory>& store = options_.engine.store;
  console_.line(fmt::format("the store {} is lost: {}", options_.store, lost.what()));
  const auto newest = checkpoints_->newest(line_of_all(lost.line()));
  if (!newest) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} And --checkpoint-dir {} has no checkpoint to go on from",
                            lost.what(), options_.checkpoint.directory));
  }
  const std::uint64_t number =
      agreed_lost_number(store, [&](std::uint64_t own) { return ranks_->all(own); });
  keep_lost(store, number);
  ranks_->part();  // all is kept
  console_.line(fmt::format(
      "  the files of the lost store are kept in {} of its {}; a new store takes its place and "
      "goes on from {}, the newest checkpoint that verifies",
      lost_folder(number), store.size() == 1 ? "directory" : "directories", newest->directory));
  replaces_store_ = true;
  begin_from(newest->directory, {.continues_line = newest->continues_line});
  ranks_->part();
  leave_lost(store, number);
}

/// Returns the line of history from the first rank that can read it; none if no rank can.
std::optional<StateLine> TrainRun::line_of_all(const std::optional<StateLine>& own) {
  struct Said {
    std::uint8_t known = 0;
    std::uint8_t has_parent = 0;
    LineId id;
    LineId parent;
    std::uint64_t left_at = 0;
  } said;
  if (own) {
    said = {.known = 1,
            .has_parent = static_cast<std::uint8_t>(own->parent ? 1 : 0),
            .id = own->id,
            .parent = own->parent.value_or(LineId{}),
            .left_at = own->left_at};
  }
  for (const Said& its : ranks_->all(said)) {
    if (its.known == 0) continue;
    StateLine line{.id = its.id, .epoch = 0, .parent = {}, .left_at = its.left_at};
    if (its.has_parent != 0) line.parent = its.parent;
    return line;
  }
  return std::nullopt;
}

void TrainRun::require_same_run(const StateContent& content, const std::string& from) const {
  const std::string difference =
      run_difference(content.run_identity, content.layout.ranks, content.layout.tensor_parallel);
  if (difference.empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}; give the settings of the saved run, or begin a new run with its "
                          "weights (--load and --load-weights)",
                          from, difference));
}

/// Returns how a saved run differs from this one; empty if both train on the same data in the same
/// order. The number of sequences in a step matters; the number of ranks that share them does not.
std::string TrainRun::run_difference(const std::string& identity, int all_ranks,
                                     int tensor_parallel) const {
  if (!RunIdentity::is_one(identity))
    return fmt::format(
        "the state belongs to another trainer, because the identity of its run is '{}'", identity);
  const RunIdentity saved = RunIdentity::parse(identity);
  const auto sequences = [](std::int64_t batch, std::int64_t accumulate, int ranks) {
    return batch * accumulate * ranks;
  };
  const int ranks = all_ranks / std::max(1, tensor_parallel);
  const std::int64_t before = sequences(saved.batch, saved.accumulate, ranks);
  const std::int64_t now =
      sequences(options_.shape.batch, options_.shape.accumulate, place_.data_ranks());
  if (saved.data_hash != text_->hash())
    return fmt::format("the saved run was trained on other data than {}", options_.data);
  if (saved.seed != options_.seed)
    return fmt::format("the seed of the saved run is {}, but this run's is {}", saved.seed,
                       options_.seed);
  if (saved.context != options_.shape.context)
    return fmt::format("the context of the saved run is {}, but this run's is {}", saved.context,
                       options_.shape.context);
  if (saved.batch != options_.shape.batch || before != now)
    return fmt::format(
        "a step of the saved run had {} sequences (batch {} x accumulate {} x {} ranks), but a "
        "step of this run has {} (batch {})",
        before, saved.batch, saved.accumulate, ranks, now, options_.shape.batch);
  return {};
}

}  // namespace ziggurat::cli
