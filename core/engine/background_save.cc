// SPDX-License-Identifier: Apache-2.0
// core/engine/background_save.cc: which record is copied next, from where, and who waits for it.
#include "core/engine/background_save.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "core/schedule/stored_record.h"
#include "tiers/quorum.h"

namespace ziggurat {

struct BackgroundSave::Run {
  Run(CancelScope& cancel, const Request& request, std::size_t chunks)
      : generation(request.generation),
        stored(request.stored),
        begun_at(monotonic_now()),
        wake(cancel),
        copies(chunks, Copy::kPending) {}

  std::uint64_t generation;
  std::uint64_t stored;
  Nanoseconds begun_at;
  Signal wake;  ///< of lanes: there may be something to do
  std::vector<Copy> copies;
  std::size_t pending = 0;
  std::deque<ChunkId> urgent;
  ChunkId next_at_hand = 0;
  ChunkId next_stored = 0;
  bool swept = false;  ///< the sweep that makes the generation has nothing more to offer
  bool over = false;   ///< nobody waits for it any more
  std::exception_ptr failure;
  std::map<ChunkId, Signal> awaited;  ///< by sweeps
  std::size_t waiting = 0;
  Nanoseconds waiting_since{0};
  Nanoseconds stalled{0};
  std::optional<Nanoseconds> next_write_at;
  std::array<Lane, kLanes> lanes;
  std::string directory;
  std::uint64_t size_bytes = 0;
};

BackgroundSave::BackgroundSave(const Parts& parts)
    : parts_(parts),
      memory_(kLanes * parts.context.table.largest_record_bytes()),
      idle_(parts.context.cancel) {
  idle_.set();
  if (Trace* const trace = parts.runtime.trace.get()) {
    save_track_ = trace->track("checkpoint");
    wait_track_ = trace->track("updates that wait for it");
  }
}

BackgroundSave::~BackgroundSave() = default;

/// Its engine is chosen once the folder has answered: that is tried on the reactor's thread.
Task<> BackgroundSave::open_folder(std::string folder) {
  if (engines_.contains(folder)) co_return;
  const std::function<void()> touch = [&] {
    std::error_code failure;
    std::filesystem::create_directories(folder, failure);
    if (failure)
      throw system_error(failure.value(),
                         fmt::format("`checkpoint_dir={}`: cannot make it", folder));
    const int file = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (file >= 0) ::close(file);
  };
  co_await caller_.run(parts_.context.reactor, "name files", touch);
  engines_[folder] = parts_.runtime.io_engine(parts_.context.reactor, folder);
}

void BackgroundSave::begin(Request request) {
  ZIGGURAT_CHECK(!run_, "generation {}: two saves at a time", request.generation);
  const ChunkTable& table = parts_.context.table;
  run_ = std::make_shared<Run>(parts_.context.cancel, request, table.chunks().size());
  const WrittenChunks written(table, request.rank);
  for (ChunkId id = 0; id < run_->copies.size(); ++id) {
    if (written.writes(id))
      ++run_->pending;
    else
      run_->copies[id] = Copy::kDone;
  }
  const std::uint64_t largest = table.largest_record_bytes();
  for (std::size_t i = 0; i < kLanes; ++i)
    run_->lanes[i].buffer = memory_.bytes().subspan(i * largest, largest);
  idle_.reset();
  Task<> saving = save(run_, std::move(request));
  parts_.context.spawn(std::move(saving));
}

Task<> BackgroundSave::ended() {
  if (run_) co_await idle_.wait();
}

Task<> BackgroundSave::save(RunPtr run, Request request) {
  SaveOutcome outcome{.step = run->generation,
                      .directory = request.checkpoint.folder + "/" +
                                   checkpoint_name(request.checkpoint.content.step)};
  try {
    Context& context = parts_.context;
    CommunicatorQuorum ranks(parts_.ranks);
    Task<> opening = open_folder(request.checkpoint.folder);
    Task<> opened = together(ranks, std::move(opening), "open its checkpoint directory");
    co_await std::move(opened);
    CheckpointSave::Environment environment{.reactor = context.reactor,
                                            .workers = context.workers,
                                            .io = *engines_.at(request.checkpoint.folder),
                                            .ranks = parts_.ranks,
                                            .calls = BlockingCalls(caller_)};
    Task<std::unique_ptr<CheckpointSave>> beginning =
        CheckpointSave::begin(environment, std::move(request.checkpoint));
    const std::unique_ptr<CheckpointSave> checkpoint = co_await std::move(beginning);
    outcome.size_bytes = checkpoint->size_bytes();
    co_await copy_all(run, *checkpoint);
    co_await checkpoint->commit(run->failure);
  } catch (const Error& error) {
    outcome.failure = error;
  } catch (const std::exception& error) {
    outcome.failure = Error(ErrorCode::kUnavailable, error.what());
  }
  give_up(*run, {});
  const auto seconds = [](Nanoseconds time) { return std::chrono::duration<double>(time).count(); };
  const Nanoseconds now = monotonic_now();
  if (Trace* const trace = parts_.runtime.trace.get())
    trace->span(save_track_, "save", run->begun_at, now, static_cast<std::int64_t>(outcome.step));
  outcome.seconds = seconds(now - run->begun_at);
  outcome.stalled_s = seconds(run->stalled);
  outcomes_.push_back(std::move(outcome));
  run_.reset();
  idle_.set();
}

Task<> BackgroundSave::copy_all(RunPtr run, CheckpointSave& save) {
  Context& context = parts_.context;
  StateSaver saver(context.reactor, context.workers, context.table, save.sink());
  WorkGroup lanes(context.reactor);
  lanes.spawn(watch_sweep(run));
  for (std::size_t i = 0; i < kLanes; ++i) lanes.spawn(lane(run, saver, i));
  co_await lanes.wait_idle();
}

Task<> BackgroundSave::watch_sweep(RunPtr run) {
  try {
    co_await sweep_->settled();
  } catch (...) {
    give_up(*run, std::current_exception());
  }
  run->swept = true;
  run->wake.set();
}

/// Nothing is read from a drive for it.
bool BackgroundSave::is_at_hand(ChunkId chunk) const { return parts_.records.stays(chunk); }

std::optional<ChunkId> BackgroundSave::next(Run& run) {
  const auto pending = [&](ChunkId id) { return run.copies[id] == Copy::kPending; };
  while (!run.urgent.empty()) {
    const ChunkId id = run.urgent.front();
    run.urgent.pop_front();
    if (pending(id)) return id;
  }
  for (; run.next_at_hand < run.copies.size(); ++run.next_at_hand) {
    if (is_at_hand(run.next_at_hand) && pending(run.next_at_hand)) return run.next_at_hand;
  }
  for (; run.swept && run.next_stored < run.copies.size(); ++run.next_stored) {
    if (pending(run.next_stored)) return run.next_stored;
  }
  return std::nullopt;
}

Task<> BackgroundSave::lane(RunPtr run, StateSaver& saver, std::size_t index) {
  using State = Lane::State;
  Lane& lane = run->lanes[index];
  try {
    lane.state = State::kIdle;
    for (;;) {
      std::optional<ChunkId> id;
      if (lane.state == State::kFull) id = lane.chunk;
      if (lane.state == State::kIdle && !run->over) id = next(*run);
      if (run->over && lane.state != State::kFilling) break;
      if (id) {
        if (lane.state == State::kIdle) take(*run, *id, lane, State::kBusy);
        co_await copy(run, saver, *id, lane);
        lane.state = State::kIdle;
        continue;
      }
      if (lane.state == State::kIdle && run->pending == 0) break;
      run->wake.reset();
      co_await run->wake.wait();
    }
  } catch (...) {
    give_up(*run, std::current_exception());
  }
  lane.state = State::kBusy;
  run->wake.set();
}

void BackgroundSave::take(Run& run, ChunkId id, Lane& lane, Lane::State state) {
  lane.state = state;
  lane.chunk = id;
  run.copies[id] = Copy::kTaken;
  --run.pending;
}

Task<> BackgroundSave::copy(RunPtr run, StateSaver& saver, ChunkId id, Lane& lane) {
  Task<std::span<const std::byte>> finding = record_of(run, id, lane);
  const std::span<const std::byte> record = co_await std::move(finding);
  co_await saver.save(id, record);
  done(*run, id);
  co_await pace(run, record.size());
}

Task<std::span<const std::byte>> BackgroundSave::record_of(RunPtr run, ChunkId id, Lane& lane) {
  Context& context = parts_.context;
  const Chunk& chunk = context.table.chunk(id);
  const std::span<std::byte> buffer = lane.buffer.first(chunk.record_bytes());
  if (lane.state == Lane::State::kFull) co_return buffer;
  if (chunk.constant) {
    co_await read_record(context, *parts_.store, id, parts_.store->durable_generation(), buffer);
    co_return buffer;
  }
  co_await sweep_->record_written(id, run->generation);
  if (!parts_.records.stays(id)) {
    co_await read_record(context, *parts_.store, id, run->stored, buffer);
    context.metrics.add(Counter::kSaveReadBytes, buffer.size());
    co_return buffer;
  }
  if (parts_.records.updated_on_device(id)) {
    co_await parts_.records.fetch(id, buffer);
    co_return buffer;
  }
  co_return parts_.records.memory(id).first(chunk.record_bytes());
}

void BackgroundSave::done(Run& run, ChunkId id) {
  run.copies[id] = Copy::kDone;
  const auto waiting = run.awaited.find(id);
  if (waiting != run.awaited.end()) waiting->second.set();
}

/// At most checkpoint_bandwidth.
Task<> BackgroundSave::pace(RunPtr run, std::uint64_t size_bytes) {
  const std::uint64_t limit = parts_.settings.bandwidth_bytes_per_s;
  if (limit == 0 || run->over) co_return;
  Clock& clock = parts_.context.reactor.clock();
  const Nanoseconds now = clock.now();
  const double share = static_cast<double>(size_bytes) / static_cast<double>(limit);
  run->next_write_at = std::max(run->next_write_at.value_or(now), now) +
                       Nanoseconds(static_cast<std::int64_t>(share * 1e9));
  const auto due = std::make_shared<Signal>(parts_.context.cancel);
  clock.after(*run->next_write_at - now, [weak = std::weak_ptr(due)] {
    if (const auto its = weak.lock()) its->set();
  });
  co_await due->wait();
}

/// Nobody waits for the save any more. Without a reason: it has ended.
void BackgroundSave::give_up(Run& run, std::exception_ptr why) {
  if (why && !run.failure) run.failure = std::move(why);
  run.over = true;
  for (auto& [id, signal] : run.awaited) signal.set();
  run.wake.set();
}

Task<> BackgroundSave::made(ChunkId id, std::uint64_t generation,
                            std::span<const std::byte> record) {
  const RunPtr run = run_;
  if (!run || run->over || run->generation != generation || run->copies[id] != Copy::kPending)
    co_return;
  const auto lane = std::ranges::find(run->lanes, Lane::State::kIdle, &Lane::state);
  if (lane == run->lanes.end()) co_return;  // it is read from its slot
  take(*run, id, *lane, Lane::State::kFilling);
  const std::function<void()> job = [&] {
    std::memcpy(lane->buffer.data(), record.data(), record.size());
  };
  co_await parts_.context.run_near(id, "offer record", job);
  lane->state = Lane::State::kFull;
  run->wake.set();
}

Task<> BackgroundSave::before_change(ChunkId id, std::uint64_t generation) {
  if (!run_ || generation <= run_->generation) co_return;
  co_await hold(id);
}

Task<> BackgroundSave::before_write(ChunkId id, std::uint64_t generation, std::uint64_t stored) {
  if (!run_ || generation <= run_->generation || parts_.records.stays(id)) co_return;
  const bool two_slots = parts_.store->state().slots == 2;
  if (two_slots && stored % 2 != run_->stored % 2) co_return;
  co_await hold(id);
}

Task<> BackgroundSave::hold(ChunkId id) {
  const RunPtr run = run_;
  if (run->over || run->copies[id] == Copy::kDone) co_return;
  run->urgent.push_back(id);
  run->wake.set();
  if (run->waiting++ == 0) run->waiting_since = monotonic_now();
  const Nanoseconds most(static_cast<std::int64_t>(parts_.settings.stall_max_s * 1e9));
  parts_.context.reactor.clock().after(most, [weak = std::weak_ptr(run), id,
                                              limit = parts_.settings.stall_max_s] {
    const RunPtr its = weak.lock();
    if (!its || its->over || its->copies[id] == Copy::kDone) return;
    give_up(*its, std::make_exception_ptr(Error(
                      ErrorCode::kDeadlineExceeded,
                      fmt::format("training waited {:g} s (checkpoint_stall_max) for it: the drive "
                                  "is too slow or hangs; training goes on",
                                  limit))));
  });
  Signal& copied = run->awaited.try_emplace(id, parts_.context.cancel).first->second;
  co_await copied.wait();
  if (--run->waiting > 0) co_return;
  const Nanoseconds now = monotonic_now();
  run->stalled += now - run->waiting_since;
  if (Trace* const trace = parts_.runtime.trace.get())
    trace->span(wait_track_, "updates wait for copies", run->waiting_since, now);
}

}  // namespace ziggurat
