// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_checkpoints.cc: decides when a run saves, describes the run in its
// checkpoints, and reports how each save ended.
#include <fmt/format.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/bytes.h"
#include "integrations/cli/train_run.h"

namespace ziggurat::cli {

/// Returns whether a checkpoint is due: by steps, alike on all ranks; by time, on rank 0 only.
bool TrainRun::save_due(std::uint64_t step) const {
  const CheckpointOptions& options = options_.checkpoint;
  if (options.every > 0 && step % options.every == 0) return true;
  return options.every_minutes > 0 && ranks_->first() &&
         now_s() - saved_at_s_ >= 60 * options.every_minutes;
}

CheckpointRequest TrainRun::checkpoint_request(const RunState& state) const {
  using nlohmann::json;
  const CheckpointOptions& options = options_.checkpoint;
  const auto sequences = static_cast<std::uint64_t>(
      options_.shape.batch * options_.shape.accumulate * place_.data_ranks());
  const std::uint64_t samples = state.attempts * sequences;
  json schedule = json::object();
  for (const Setting& setting : schedule_settings()) {
    const auto found = state.settings.find(dashed(setting.name));
    if (found != state.settings.end() && found->second != "none")
      schedule[setting.name] = found->second;
  }
  json scale = nullptr;
  if (state.loss_scale) {
    scale = {{"scale", state.loss_scale->scale},
             {"hysteresis_left", state.loss_scale->hysteresis_left},
             {"steps_since_overflow", state.loss_scale->steps_since_overflow}};
  }
  const json best =
      best_ ? json{{"name", "held_out_loss"}, {"step", best_->step}, {"value", best_->value}}
            : json(nullptr);
  const std::string data = fmt::format("{:016x}", text_->hash());
  const auto context = static_cast<std::uint64_t>(options_.shape.context);
  CheckpointRequest request{.folder = options.directory,
                            .resume = {},
                            .keep_last = options.keep_last,
                            .keep_every = options.keep_every,
                            .keep_best = options.keep_best};
  request.resume = {
      {"schedule", schedule.dump()},
      {"loss_scale", scale.dump()},
      {"consumed_samples", json(samples).dump()},
      {"consumed_tokens", json(samples * context).dump()},
      {"data_cursor", json{{"attempts", state.attempts}, {"samples", samples}}.dump()},
      // No random generator has a state, because batches and noise are functions of the seed and
      // the step.
      {"rng", json{{"seed", options_.seed}, {"step", state.steps_done}}.dump()},
      {"best_metric", best.dump()},
      {"data", json(data).dump()},
      {"evaluation", json{{"data", data}, {"context", context}}.dump()},
      {"tokenizer", json("bytes").dump()}};
  return request;
}

/// Notes whether the engine began the save that it was asked for. A checkpoint that is due while an
/// earlier save is under way is saved with the first step after that save.
void TrainRun::note_save(bool asked, const StepResult& result, std::uint64_t step) {
  if (!asked || result.skipped) return;
  if (!result.saves) {
    if (!std::exchange(wait_was_said_, true)) {
      console_.line(
          fmt::format("the checkpoint due at step {} waits for the previous one, which "
                      "is still being written",
                      step));
    }
    return;
  }
  save_waits_ = false;
  wait_was_said_ = false;
  saved_step_ = step;
  saved_at_s_ = now_s();
}

/// Prints each note once, because every save finds the same files in the folder.
void TrainRun::say_notes(const SaveOutcome& save) {
  for (const std::string& note : save.notes) {
    if (notes_said_.insert(note).second) console_.line("  " + note);
  }
}

void TrainRun::report_saves(bool goes_on) {
  for (const SaveOutcome& save : engine_->ended_saves()) {
    if (json_) saves_.push_back(save);
    last_save_failed_ = save.failure.has_value() && save.failure->native() != EEXIST;
    say_notes(save);
    if (save.failure) {
      console_.line(fmt::format("the checkpoint of step {} failed{}: {}", save.step,
                                goes_on ? ", and training goes on" : "", save.failure->what()));
      // Another process was saving in the folder, so the end of the run tries once more.
      if (save.failure->native() == EWOULDBLOCK && saved_step_ == save.step) saved_step_.reset();
      continue;
    }
    console_.line(fmt::format(
        "{}: {} a rank in {:.1f} s{}", save.directory, format_bytes(save.size_bytes), save.seconds,
        save.stalled_s >= 0.1 ? fmt::format("; updates waited {:.1f} s for it", save.stalled_s)
                              : ""));
  }
}

/// Waits for the save under way at the end of a run, and then saves the last step if it is not
/// saved.
void TrainRun::finish_saves() {
  engine_->finish_saves();
  report_saves(/*goes_on=*/false);
  if (options_.checkpoint.directory.empty() || saved_step_ == engine_->generation()) return;
  try {
    engine_->save_checkpoint(checkpoint_request(state_now()));
    last_save_failed_ = false;
  } catch (const Error& error) {
    // EEXIST means that an earlier run has saved this step.
    last_save_failed_ = error.native() != EEXIST;
    if (last_save_failed_) {
      console_.line(
          fmt::format("the checkpoint of step {} failed: {}", engine_->generation(), error.what()));
    }
  }
  report_saves(/*goes_on=*/false);
}

}  // namespace ziggurat::cli
