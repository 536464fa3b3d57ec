// SPDX-License-Identifier: Apache-2.0
// core/engine/state/background_save.cc: begins and commits a checkpoint whose records are copied
// beside the sweeps.
#include "core/engine/state/background_save.h"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <utility>

#include "aio/probe.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "core/checkpoint/save_ranks.h"
#include "tiers/store/quorum.h"

namespace ziggurat {

struct BackgroundSave::Run {
  Run(const Parts& parts, const Request& request)
      : generation(request.generation),
        directory(request.checkpoint.folder + "/" +
                  checkpoint_name(request.checkpoint.content.step)),
        begun_at(parts.context.reactor.clock().now()),
        target(parts.context.reactor, parts.settings.stall_max_s) {}

  std::uint64_t generation;
  std::string directory;
  Nanoseconds begun_at;
  bool reported = false;  ///< the result of the save was reported
  SaveTarget target;
};

namespace {

/// Converts a failure to the Error that an outcome has.
Error error_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return {ErrorCode::kUnavailable, error.what()};
  }
}

}  // namespace

BackgroundSave::BackgroundSave(const Parts& parts)
    : parts_(parts), memory_(RecordCopier::kLanes * parts.context.table.largest_record_bytes()) {
  if (Trace* const trace = parts.runtime.trace.get()) save_track_ = trace->track("checkpoint");
}

/// Makes the folder and its IoEngine. Not on the reactor's thread, because a call to the target may
/// hang.
Task<> BackgroundSave::open_folder(std::string folder) {
  if (engines_.contains(folder)) co_return;
  const IoEngineFactory& factory = parts_.runtime.io_engine;
  MakeIoEngine make = [&](Reactor& reactor) { return factory(reactor, folder); };
  const std::function<void()> touch = [&] {
    std::error_code failure;
    std::filesystem::create_directories(folder, failure);
    if (failure)
      throw system_error(failure.value(),
                         fmt::format("cannot make the folder `checkpoint_dir={}`", folder));
    if (factory.target<ChooseIoEngine>() != nullptr) make = chosen_io_engine(folder);
  };
  co_await caller_.run(parts_.context.reactor, {.name = "name files", .bytes = 0, .decides = true},
                       touch);
  engines_[folder] = make(parts_.context.reactor);
}

void BackgroundSave::begin(Request request) {
  ZIGGURAT_CHECK(!run_, "generation {}: two saves at a time", request.generation);
  run_ = std::make_shared<Run>(parts_, request);
  const WrittenChunks written(parts_.context.table, request.rank);
  parts_.copier.begin({.generation = request.generation,
                       .stored = request.stored,
                       .buffers = memory_.bytes(),
                       .stall_max_s = parts_.settings.stall_max_s,
                       .bandwidth_bytes_per_s = parts_.settings.bandwidth_bytes_per_s},
                      [&](ChunkId id) { return written.writes(id); });
  hangs_ = false;
  Task<> saving = save(run_, std::move(request));
  parts_.context.spawn(std::move(saving));
}

/// Waits for the end of the save, or gives it up if its target hangs. If the engine has failed,
/// what is under way may hang all the same.
Task<> BackgroundSave::ended() {
  const RunPtr run = run_;
  if (!run) co_return;
  Task<Nanoseconds> waiting =
      run->target.ended_or_silent([this] { return parts_.copier.waits_for_time(); });
  const Nanoseconds silent = co_await std::move(waiting);
  if (silent == Nanoseconds{0} || run_ != run) co_return;
  hangs_ = true;
  parts_.copier.give_up(std::make_exception_ptr(run->target.not_answered(silent)));
  SaveOutcome outcome{.step = run->generation, .directory = run->directory};
  const std::exception_ptr failure = parts_.copier.failure();
  outcome.failure = error_of(failure);
  report(*run, std::move(outcome), failure);
}

void BackgroundSave::report(Run& run, SaveOutcome outcome, const std::exception_ptr& failure) {
  if (std::exchange(run.reported, true)) return;
  // Whoever shows outcomes shows rank 0's, which name another rank's failure in few words.
  if (parts_.ranks.rank() != 0 && failure && !followed_from_another(failure)) {
    log().warn("rank {}: the checkpoint of step {} is not saved: {}", parts_.ranks.rank(),
               outcome.step, outcome.failure->what());
  }
  const auto seconds = [](Nanoseconds time) { return std::chrono::duration<double>(time).count(); };
  outcome.seconds = seconds(parts_.context.reactor.clock().now() - run.begun_at);
  outcome.stalled_s = seconds(parts_.copier.stalled());
  outcomes_.push_back(std::move(outcome));
}

// GCC 12 inlines the coroutine frame's operator new but not its delete, and so warns that they do
// not match.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
Task<> BackgroundSave::save(RunPtr run, Request request) {
  SaveOutcome outcome{.step = run->generation, .directory = run->directory};
  std::exception_ptr failure;
  std::unique_ptr<CheckpointSave> checkpoint;
  try {
    Context& context = parts_.context;
    std::optional<SaveTarget::Asked> asked;
    asked.emplace(run->target);
    std::exception_ptr refused;
    try {
      co_await open_folder(request.checkpoint.folder);
    } catch (...) {
      refused = std::current_exception();
    }
    SaveRanks ranks(context.reactor, parts_.ranks);
    co_await ranks.agree(refused, request.checkpoint.folder);
    CheckpointSave::Environment environment{.reactor = context.reactor,
                                            .workers = context.workers,
                                            .io = *engines_.at(request.checkpoint.folder),
                                            .ranks = parts_.ranks,
                                            .observers = {.metrics = &run->target.moved()},
                                            .calls = BlockingCalls(caller_)};
    Task<std::unique_ptr<CheckpointSave>> beginning =
        CheckpointSave::begin(environment, std::move(request.checkpoint));
    checkpoint = co_await std::move(beginning);
    outcome.size_bytes = checkpoint->size_bytes();
    asked.reset();
    run->target.copying(true);
    co_await copy_all(*run, *checkpoint);
    run->target.copying(false);
    asked.emplace(run->target);
    co_await checkpoint->commit(parts_.copier.failure());
    outcome.directory = checkpoint->directory();
  } catch (...) {
    failure = std::current_exception();
    outcome.failure = error_of(failure);
  }
  if (checkpoint) outcome.notes = checkpoint->notes();
  checkpoint.reset();
  if (Trace* const trace = parts_.runtime.trace.get()) {
    trace->span(save_track_, "save", run->begun_at, parts_.context.reactor.clock().now(),
                static_cast<std::int64_t>(outcome.step));
  }
  report(*run, std::move(outcome), failure);
  parts_.copier.end();
  run_.reset();
  run->target.end();
}

#pragma GCC diagnostic pop

Task<> BackgroundSave::copy_all(Run& run, CheckpointSave& save) {
  Context& context = parts_.context;
  StateSaver saver(context.reactor, context.workers, context.table, save.sink());
  const RecordCopier::Save write = [&](ChunkId id, std::span<std::byte> record) -> Task<> {
    const SaveTarget::Asked asked(run.target);
    co_await saver.save(id, record);
  };
  co_await parts_.copier.copy_all(write);
}

void BackgroundSave::give_up_with_others() {
  if (!run_ || parts_.copier.given_up()) return;
  parts_.copier.give_up(std::make_exception_ptr(
      PeerFailed(ErrorCode::kDeadlineExceeded,
                 "another rank has given up this save: that rank's message says why")));
}

}  // namespace ziggurat
