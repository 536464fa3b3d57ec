// SPDX-License-Identifier: Apache-2.0
// core/engine/state/background_save.cc: chooses which record is copied next and from where, and
// makes sweeps wait for it.
#include "core/engine/state/background_save.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "aio/probe.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/runtime/seconds.h"
#include "core/checkpoint/save_ranks.h"
#include "core/engine/state/stall_limit.h"
#include "core/schedule/stored_record.h"
#include "tiers/quorum.h"

namespace ziggurat {

struct BackgroundSave::Run {
  Run(BackgroundSave& its, const Request& request)
      : generation(request.generation),
        stored(request.stored),
        directory(request.checkpoint.folder + "/" +
                  checkpoint_name(request.checkpoint.content.step)),
        begun_at(its.parts_.context.reactor.clock().now()),
        wake(its.parts_.context.cancel),
        copies(its.parts_.context.table.chunks().size(), Copy::kPending),
        stall(its.parts_.context.reactor.clock(), nanoseconds_of(its.parts_.settings.stall_max_s),
              [this, &its] { give_up(*this, std::make_exception_ptr(its.stalled_too_long())); }) {}

  std::uint64_t generation;
  std::uint64_t stored;
  std::string directory;
  Nanoseconds begun_at;
  Signal wake;  ///< wakes lanes, because there may be something to do
  std::vector<Copy> copies;
  std::size_t pending = 0;
  std::deque<ChunkId> urgent;
  ChunkId next_at_hand = 0;
  ChunkId next_stored = 0;
  bool swept = false;     ///< the sweep that makes the generation has no more records to offer
  bool over = false;      ///< the save has ended or was given up: nobody waits for it
  bool reported = false;  ///< the result of the save was reported
  /// Records are being written. Before and after, calls answer only at their end: syncs, removals,
  /// and exchanges with other ranks.
  bool copying = false;
  std::size_t asked = 0;       ///< calls to the target that have not returned
  std::uint64_t returned = 0;  ///< calls to the target that have returned
  std::exception_ptr failure;
  std::map<ChunkId, Signal> awaited;  ///< records that sweeps wait for
  StallLimit stall;
  std::optional<Nanoseconds> next_write_at;
  std::array<Lane, kLanes> lanes;
};

namespace {

/// Counts a call to the target, which has not returned while this object lives.
class Asked {
 public:
  Asked(std::size_t& asked, std::uint64_t& returned) : asked_(asked), returned_(returned) {
    ++asked_;
  }
  ~Asked() {
    --asked_;
    ++returned_;
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

 private:
  std::size_t& asked_;
  std::uint64_t& returned_;
};

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

/// A time that is longer than any wait.
constexpr Nanoseconds kNever = std::chrono::years(1);

/// How often a target is looked at in the time for which it may be silent.
constexpr int kLooks = 8;

}  // namespace

BackgroundSave::BackgroundSave(const Parts& parts)
    : parts_(parts), memory_(kLanes * parts.context.table.largest_record_bytes()) {
  if (Trace* const trace = parts.runtime.trace.get()) {
    save_track_ = trace->track("checkpoint");
    wait_track_ = trace->track("updates that wait for it");
  }
}

BackgroundSave::~BackgroundSave() = default;

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
  co_await caller_.run(parts_.context.reactor, "name files", touch);
  engines_[folder] = make(parts_.context.reactor);
}

void BackgroundSave::begin(Request request) {
  ZIGGURAT_CHECK(!run_, "generation {}: two saves at a time", request.generation);
  const ChunkTable& table = parts_.context.table;
  run_ = std::make_shared<Run>(*this, request);
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
  hangs_ = false;
  Task<> saving = save(run_, std::move(request));
  parts_.context.spawn(std::move(saving));
}

/// Waits for the end of the save, or gives it up if its target hangs. If the engine has failed,
/// what is under way may hang all the same.
Task<> BackgroundSave::ended() {
  const RunPtr run = run_;
  const Nanoseconds of_writes = std::max(nanoseconds_of(parts_.settings.stall_max_s), kSilence);
  const auto limit = [&] { return run->copying ? of_writes : std::max(of_writes, kLongSilence); };
  Nanoseconds silent{0};
  for (std::uint64_t before = 0; run && run_ == run && silent < limit();) {
    co_await ended_or(of_writes / kLooks);
    const std::uint64_t now = answers(*run);
    const bool waits = run->asked > 0 && std::ranges::none_of(run->lanes, [](const Lane& lane) {
                         return lane.due && !lane.due->is_set();
                       });
    silent = waits && now == before ? silent + of_writes / kLooks : Nanoseconds{0};
    before = now;
  }
  if (!run || run_ != run) co_return;
  hangs_ = true;
  give_up(*run,
          std::make_exception_ptr(not_answered(std::chrono::duration<double>(silent).count())));
  SaveOutcome outcome{.step = run->generation, .directory = run->directory};
  outcome.failure = error_of(run->failure);
  report(*run, std::move(outcome), run->failure);
}

Task<> BackgroundSave::ended_or(Nanoseconds longest) {
  Reactor& reactor = parts_.context.reactor;
  const auto ended = ended_ = std::make_shared<Signal>(reactor);
  if (longest < kNever) {
    reactor.clock().after(longest, [weak = std::weak_ptr(ended)] {
      if (const auto its = weak.lock()) its->set();
    });
  }
  co_await ended->wait();
}

/// Returns a number that grows with every answer of the target.
std::uint64_t BackgroundSave::answers(const Run& run) const {
  return run.returned + moved_.value(Counter::kNvmeWriteBytes) +
         moved_.value(Counter::kNvmeReadBytes);
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
  outcome.stalled_s = seconds(run.stall.stalled());
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
    std::optional<Asked> asked;
    asked.emplace(run->asked, run->returned);
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
                                            .observers = {.metrics = &moved_},
                                            .calls = BlockingCalls(caller_)};
    Task<std::unique_ptr<CheckpointSave>> beginning =
        CheckpointSave::begin(environment, std::move(request.checkpoint));
    checkpoint = co_await std::move(beginning);
    outcome.size_bytes = checkpoint->size_bytes();
    asked.reset();
    run->copying = true;
    co_await copy_all(run, *checkpoint);
    run->copying = false;
    asked.emplace(run->asked, run->returned);
    co_await checkpoint->commit(run->failure);
    outcome.directory = checkpoint->directory();
  } catch (...) {
    failure = std::current_exception();
    outcome.failure = error_of(failure);
  }
  if (checkpoint) outcome.notes = checkpoint->notes();
  checkpoint.reset();
  give_up(*run, {});
  if (Trace* const trace = parts_.runtime.trace.get()) {
    trace->span(save_track_, "save", run->begun_at, parts_.context.reactor.clock().now(),
                static_cast<std::int64_t>(outcome.step));
  }
  report(*run, std::move(outcome), failure);
  run_.reset();
  if (ended_) ended_->set();
}

#pragma GCC diagnostic pop

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

std::optional<ChunkId> BackgroundSave::next(Run& run) {
  const auto pending = [&](ChunkId id) { return run.copies[id] == Copy::kPending; };
  while (!run.urgent.empty()) {
    const ChunkId id = run.urgent.front();
    run.urgent.pop_front();
    if (pending(id)) return id;
  }
  for (; run.next_at_hand < run.copies.size(); ++run.next_at_hand) {
    if (parts_.records.stays(run.next_at_hand) && pending(run.next_at_hand))
      return run.next_at_hand;
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
        co_await copy(*run, saver, *id, lane);
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

/// Copies one record. No step waits for the write to the target, which may never end.
Task<> BackgroundSave::copy(Run& run, StateSaver& saver, ChunkId id, Lane& lane) {
  const std::span<std::byte> record =
      lane.buffer.first(parts_.context.table.chunk(id).record_bytes());
  if (lane.state != Lane::State::kFull) co_await fill(run, id, record);
  co_await pace(run, lane, record.size());
  if (run.over) co_return;
  const Asked asked(run.asked, run.returned);
  co_await saver.save(id, record);
}

/// Fills a buffer with a record. Afterwards, even after an error, the chunk's memory and slot are
/// no longer read.
Task<> BackgroundSave::fill(Run& run, ChunkId id, std::span<std::byte> buffer) {
  std::exception_ptr error;
  try {
    co_await bring(run, id, buffer);
  } catch (...) {
    error = std::current_exception();
  }
  copied(run, id);
  if (error) std::rethrow_exception(error);
}

/// Reads a record into a buffer. The record in memory may be a guess at the next generation, made
/// before the save began; then the right one is still in its slot.
Task<> BackgroundSave::bring(Run& run, ChunkId id, std::span<std::byte> buffer) {
  Context& context = parts_.context;
  if (context.table.chunk(id).constant) {
    co_await read_record(context, *parts_.store, id, parts_.store->durable_generation(), buffer);
    co_return;
  }
  co_await sweep_->record_written(id, run.generation);
  if (run.over) co_return;
  context.cancel.check();
  if (!parts_.records.holds(id, run.generation)) {
    ZIGGURAT_CHECK(parts_.records.through_store(),
                   "chunk {}: its record of generation {} is in memory alone, and not there", id,
                   run.generation);
    co_await read_record(context, *parts_.store, id, run.stored, buffer);
    context.metrics.add(Counter::kSaveReadBytes, buffer.size());
  } else if (parts_.records.updated_on_device(id)) {
    co_await parts_.records.fetch(id, buffer);
  } else {
    const std::function<void()> job = [&] {
      std::memcpy(buffer.data(), parts_.records.memory(id).data(), buffer.size());
    };
    co_await context.run_near(id, "copy record", job);
  }
}

void BackgroundSave::copied(Run& run, ChunkId id) {
  run.copies[id] = Copy::kDone;
  const auto waiting = run.awaited.find(id);
  if (waiting != run.awaited.end()) waiting->second.set();
}

/// Keeps to checkpoint_bandwidth: a write begins when the time for the write before it is over.
Task<> BackgroundSave::pace(Run& run, Lane& lane, std::uint64_t size_bytes) {
  const std::uint64_t limit = parts_.settings.bandwidth_bytes_per_s;
  if (limit == 0 || run.over) co_return;
  Clock& clock = parts_.context.reactor.clock();
  const Nanoseconds now = clock.now();
  const Nanoseconds begin = std::max(run.next_write_at.value_or(now), now);
  const Nanoseconds share =
      nanoseconds_of(static_cast<double>(size_bytes) / static_cast<double>(limit));
  run.next_write_at = std::min(begin + share, now + kLongestWait);
  if (begin == now) co_return;
  const auto due = lane.due = std::make_shared<Signal>(parts_.context.cancel);
  clock.after(begin - now, [weak = std::weak_ptr(due)] {
    if (const auto its = weak.lock()) its->set();
  });
  co_await due->wait();
}

/// Stops all waits for the save, except for a record that is just being read. Without `why`, the
/// save has ended.
void BackgroundSave::give_up(Run& run, std::exception_ptr why) {
  if (why && !run.failure) run.failure = std::move(why);
  run.over = true;
  for (auto& [id, signal] : run.awaited) {
    if (run.copies[id] == Copy::kPending) signal.set();
  }
  for (Lane& lane : run.lanes) {
    if (lane.due) lane.due->set();
  }
  run.wake.set();
}

bool BackgroundSave::given_up() const noexcept { return run_ && run_->over; }

void BackgroundSave::give_up_with_others() {
  if (!run_ || run_->over) return;
  give_up(*run_, std::make_exception_ptr(PeerFailed(
                     ErrorCode::kDeadlineExceeded,
                     "another rank has given up this save: that rank's message says why")));
}

Task<> BackgroundSave::made(ChunkId id, std::uint64_t generation,
                            std::span<const std::byte> record) {
  const RunPtr run = run_;
  if (!run || run->over || run->generation != generation || run->copies[id] != Copy::kPending)
    co_return;
  const auto lane = std::ranges::find(run->lanes, Lane::State::kIdle, &Lane::state);
  if (lane == run->lanes.end()) co_return;  // the record is read from its slot later
  take(*run, id, *lane, Lane::State::kFilling);
  const std::function<void()> job = [&] {
    std::memcpy(lane->buffer.data(), record.data(), record.size());
  };
  co_await parts_.context.run_near(id, "offer record", job);
  lane->state = Lane::State::kFull;
  copied(*run, id);
  run->wake.set();
}

Task<> BackgroundSave::before_change(ChunkId id, std::uint64_t generation) {
  if (!run_ || generation <= run_->generation) co_return;
  co_await hold(id);
}

Task<> BackgroundSave::before_write(ChunkId id, std::uint64_t generation, std::uint64_t stored) {
  if (!run_ || generation <= run_->generation) co_return;
  const bool two_slots = parts_.store->state().slots == 2;
  if (two_slots && stored % 2 != run_->stored % 2) co_return;
  co_await hold(id);
}

/// Waits until the chunk is copied. If the save is given up and copying has not begun, does not
/// wait.
Task<> BackgroundSave::hold(ChunkId id) {
  const RunPtr run = run_;
  const Copy copy = run->copies[id];
  if (copy == Copy::kDone || (copy == Copy::kPending && run->over)) co_return;
  if (copy == Copy::kPending) {
    run->urgent.push_back(id);
    run->wake.set();
  }
  run->stall.begin();
  Signal& free = run->awaited.try_emplace(id, parts_.context.cancel).first->second;
  co_await free.wait();
  const Nanoseconds since = run->stall.since();
  Trace* const trace = parts_.runtime.trace.get();
  if (run->stall.end() && trace != nullptr)
    trace->span(wait_track_, "updates wait for copies", since,
                parts_.context.reactor.clock().now());
}

Error BackgroundSave::not_answered(double seconds) const {
  return {ErrorCode::kDeadlineExceeded,
          fmt::format("the drive of the checkpoint (or the server behind it) has not answered for "
                      "{:g} s, while `checkpoint_stall_max` is {:g}, and seems to hang. Save to "
                      "another drive, or raise `checkpoint_stall_max` if this drive is only slow",
                      seconds, parts_.settings.stall_max_s)};
}

Error BackgroundSave::stalled_too_long() const {
  const bool paced = parts_.settings.bandwidth_bytes_per_s > 0;
  return {
      ErrorCode::kDeadlineExceeded,
      fmt::format(
          "training has waited {:g} s for the save, as long as `checkpoint_stall_max` allows, "
          "because the drive is too slow or hangs{}. Training goes on without this checkpoint. "
          "Save less often or to a faster drive, or raise `checkpoint_stall_max`",
          parts_.settings.stall_max_s, paced ? ", or `checkpoint_bandwidth` is too small" : "")};
}

}  // namespace ziggurat
