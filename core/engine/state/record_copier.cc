// SPDX-License-Identifier: Apache-2.0
// core/engine/state/record_copier.cc: chooses which record is copied next and from where, and makes
// sweeps wait for it.
#include "core/engine/state/record_copier.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/runtime/seconds.h"
#include "core/schedule/stored_record.h"

namespace ziggurat {
namespace {

/// Copies' jobs do not wait behind a sweep's: they are few, and sweeps may wait for them.
constexpr auto kTurn = Workers::Turn::kSoon;

}  // namespace

struct RecordCopier::Run {
  Run(const Context& context, Request its)
      : request(std::move(its)),
        wake(context.cancel),
        copies(context.table.chunks().size(), Copy::kPending),
        stall(context.reactor.clock(), nanoseconds_of(request.stall_max_s),
              [this] { give_up(*this, std::make_exception_ptr(stalled_too_long(request))); }) {
    if (request.bandwidth_bytes_per_s > 0) pace.emplace(request.bandwidth_bytes_per_s);
  }

  Request request;
  Signal wake;  ///< wakes lanes, because there may be something to do
  std::vector<Copy> copies;
  std::size_t pending = 0;
  std::deque<ChunkId> urgent;
  std::deque<SetAside> set_aside;
  std::uint64_t spare_used = 0;  ///< bytes of records set aside, or being set aside
  std::size_t setting_aside = 0;
  ChunkId next_at_hand = 0;
  ChunkId next_stored = 0;
  bool swept = false;  ///< the sweep that makes the generation has no more records to offer
  bool over = false;   ///< the copy has ended or was given up: nobody waits for it
  std::exception_ptr failure;
  std::map<ChunkId, Signal> awaited;  ///< records that sweeps wait for
  StallLimit stall;
  std::optional<SavePace> pace;  ///< none without a bandwidth
  std::array<Lane, kLanes> lanes;
  AlignedPool spare;
};

RecordCopier::RecordCopier(const Parts& parts) : parts_(parts) {
  if (Trace* const trace = parts.context.trace)
    wait_track_ = trace->track("updates that wait for it");
}

void RecordCopier::begin(const Request& request, const std::function<bool(ChunkId)>& has) {
  ZIGGURAT_CHECK(!run_, "generation {}: two copies at a time", request.generation);
  run_ = std::make_shared<Run>(parts_.context, request);
  for (ChunkId id = 0; id < run_->copies.size(); ++id) {
    if (has(id))
      ++run_->pending;
    else
      run_->copies[id] = Copy::kDone;
  }
  const std::uint64_t largest = parts_.context.table.largest_record_bytes();
  for (std::size_t i = 0; i < kLanes; ++i)
    run_->lanes[i].buffer = request.buffers.subspan(i * largest, largest);
}

Task<> RecordCopier::copy_all(const Save& save) {
  const RunPtr run = run_;
  WorkGroup lanes(parts_.context.reactor);
  lanes.spawn(watch_sweep(run));
  for (std::size_t i = 0; i < kLanes; ++i) lanes.spawn(lane(run, save, i));
  co_await lanes.wait_idle();
}

void RecordCopier::end() {
  if (!run_) return;
  give_up(*run_, {});
  run_.reset();
}

/// Waits until the sweep that makes the generation has written its records. It may not be durable
/// for long after that, because its blob comes later.
Task<> RecordCopier::watch_sweep(RunPtr run) {
  try {
    for (ChunkId id = 0; id < run->copies.size() && !run->over; ++id) {
      if (!parts_.context.table.chunk(id).constant)
        co_await sweep_->record_written(id, run->request.generation);
    }
  } catch (...) {
    give_up(*run, std::current_exception());
  }
  run->swept = true;
  run->wake.set();
}

/// Returns the record that a sweep has waited for longest.
std::optional<ChunkId> RecordCopier::next_urgent(Run& run) {
  while (!run.urgent.empty() && run.copies[run.urgent.front()] != Copy::kPending)
    run.urgent.pop_front();
  if (run.urgent.empty()) return std::nullopt;
  return run.urgent.front();
}

std::optional<ChunkId> RecordCopier::next(Run& run) {
  const auto pending = [&](ChunkId id) { return run.copies[id] == Copy::kPending; };
  if (const std::optional<ChunkId> urgent = next_urgent(run)) return urgent;
  for (; run.next_at_hand < run.copies.size(); ++run.next_at_hand) {
    if (parts_.records.stays(run.next_at_hand) && pending(run.next_at_hand))
      return run.next_at_hand;
  }
  for (; run.swept && run.next_stored < run.copies.size(); ++run.next_stored) {
    if (pending(run.next_stored)) return run.next_stored;
  }
  return std::nullopt;
}

/// Saves one record after the other. Records that a sweep waits for come first, because what is set
/// aside is in nobody's way.
Task<> RecordCopier::lane(RunPtr run, const Save& save, std::size_t index) {
  using State = Lane::State;
  Lane& lane = run->lanes[index];
  try {
    lane.state = State::kIdle;
    for (;;) {
      if (run->over && lane.state != State::kFilling) break;
      const bool idle = lane.state == State::kIdle;
      if (idle && !run->set_aside.empty() && !next_urgent(*run)) {
        lane.state = State::kBusy;
        co_await save_set_aside(*run, save, lane);
        lane.state = State::kIdle;
        continue;
      }
      std::optional<ChunkId> id;
      if (lane.state == State::kFull) id = lane.chunk;
      if (idle) id = next(*run);
      if (id) {
        if (idle) {
          take(*run, *id);
          lane.state = State::kBusy;
        }
        co_await save_next(*run, save, lane, *id);
        lane.state = State::kIdle;
        continue;
      }
      const bool more = run->pending > 0 || run->setting_aside > 0 || !run->set_aside.empty();
      if (idle && !more) break;
      run->wake.reset();
      co_await run->wake.wait();
    }
  } catch (...) {
    give_up(*run, std::current_exception());
  }
  lane.state = State::kBusy;
  run->wake.set();
}

void RecordCopier::take(Run& run, ChunkId id) {
  run.copies[id] = Copy::kTaken;
  --run.pending;
}

/// Saves one record, which may take forever; no step waits for that.
Task<> RecordCopier::save_next(Run& run, const Save& save, Lane& lane, ChunkId id) {
  const std::span<std::byte> record =
      lane.buffer.first(parts_.context.table.chunk(id).record_bytes());
  if (lane.state != Lane::State::kFull) co_await fill(run, id, record);
  co_await pace(run, lane, record.size());
  if (!run.over) co_await save(id, record);
}

Task<> RecordCopier::save_set_aside(Run& run, const Save& save, Lane& lane) {
  SetAside its = std::move(run.set_aside.front());
  run.set_aside.pop_front();
  const std::span<std::byte> record = its.record.span();
  co_await pace(run, lane, record.size());
  if (!run.over) co_await save(its.chunk, record);
  run.spare_used -= record.size();
}

/// Fills a buffer with a record. Afterwards, even after an error, the chunk's memory and slot are
/// no longer read.
Task<> RecordCopier::fill(Run& run, ChunkId id, std::span<std::byte> buffer) {
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
/// before the copy began; then the right one is still in its slot.
Task<> RecordCopier::bring(Run& run, ChunkId id, std::span<std::byte> buffer) {
  Context& context = parts_.context;
  if (context.table.chunk(id).constant) {
    co_await read_record(context, *parts_.store, id, parts_.store->durable_generation(), buffer,
                         kTurn);
    co_return;
  }
  const std::uint64_t generation = run.request.generation;
  co_await sweep_->record_written(id, generation);
  if (run.over) co_return;
  context.cancel.check();
  if (!parts_.records.holds(id, generation)) {
    ZIGGURAT_CHECK(parts_.records.through_store(),
                   "chunk {}: its record of generation {} is in memory alone, and not there", id,
                   generation);
    co_await read_record(context, *parts_.store, id, run.request.stored, buffer, kTurn);
    context.metrics.add(Counter::kSaveReadBytes, buffer.size());
  } else if (parts_.records.updated_on_device(id)) {
    co_await parts_.records.fetch(id, buffer);
  } else {
    const std::function<void()> job = [&] {
      std::memcpy(buffer.data(), parts_.records.memory(id).data(), buffer.size());
    };
    co_await context.run_near(id, {"copy record", 2 * buffer.size()}, job, kTurn);
  }
}

void RecordCopier::copied(Run& run, ChunkId id) {
  run.copies[id] = Copy::kDone;
  const auto waiting = run.awaited.find(id);
  if (waiting != run.awaited.end()) waiting->second.set();
}

/// Keeps to the bandwidth.
Task<> RecordCopier::pace(Run& run, Lane& lane, std::uint64_t size_bytes) {
  if (!run.pace || run.over) co_return;
  Clock& clock = parts_.context.reactor.clock();
  const Nanoseconds now = clock.now();
  const Nanoseconds begin = run.pace->begin(now, size_bytes);
  if (begin == now) co_return;
  const auto due = lane.due = std::make_shared<Signal>(parts_.context.cancel);
  clock.after(begin - now, [weak = std::weak_ptr(due)] {
    if (const auto its = weak.lock()) its->set();
  });
  co_await due->wait();
}

bool RecordCopier::waits_for_time() const noexcept {
  return run_ && std::ranges::any_of(
                     run_->lanes, [](const Lane& lane) { return lane.due && !lane.due->is_set(); });
}

/// Without `why`, the copy has ended.
void RecordCopier::give_up(Run& run, std::exception_ptr why) {
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

void RecordCopier::give_up(std::exception_ptr why) {
  if (run_) give_up(*run_, std::move(why));
}

bool RecordCopier::given_up() const noexcept { return run_ && run_->over; }

std::exception_ptr RecordCopier::failure() const noexcept { return run_ ? run_->failure : nullptr; }

Nanoseconds RecordCopier::stalled() const noexcept {
  return run_ ? run_->stall.stalled() : Nanoseconds{0};
}

Task<> RecordCopier::made(ChunkId id, std::uint64_t generation, std::span<const std::byte> record) {
  const RunPtr run = run_;
  if (!run || run->over || run->request.generation != generation ||
      run->copies[id] != Copy::kPending)
    co_return;
  const auto lane = std::ranges::find(run->lanes, Lane::State::kIdle, &Lane::state);
  if (lane == run->lanes.end()) co_return;  // the record is read from its slot later
  take(*run, id);
  lane->state = Lane::State::kFilling;
  lane->chunk = id;
  const std::function<void()> job = [&] {
    std::memcpy(lane->buffer.data(), record.data(), record.size());
  };
  co_await parts_.context.run_near(id, {"offer record", 2 * record.size()}, job, kTurn);
  lane->state = Lane::State::kFull;
  copied(*run, id);
  run->wake.set();
}

Task<> RecordCopier::before_change(ChunkId id, std::uint64_t generation) {
  if (!run_ || generation <= run_->request.generation) co_return;
  co_await hold(id);
}

Task<> RecordCopier::before_write(ChunkId id, std::uint64_t generation, std::uint64_t stored) {
  if (!run_ || generation <= run_->request.generation) co_return;
  const bool two_slots = parts_.store->state().slots == 2;
  if (two_slots && stored % 2 != run_->request.stored % 2) co_return;
  co_await hold(id);
}

/// Waits until the chunk is copied. If the copy is given up and copying has not begun, does not
/// wait.
Task<> RecordCopier::hold(ChunkId id) {
  const RunPtr run = run_;
  const Copy copy = run->copies[id];
  if (copy == Copy::kDone || (copy == Copy::kPending && run->over)) co_return;
  if (copy == Copy::kPending) {
    const std::uint64_t size = parts_.context.table.chunk(id).record_bytes();
    if (run->spare_used + size <= run->request.spare_bytes) {
      co_await set_aside(run, id);
      co_return;
    }
    run->urgent.push_back(id);
    run->wake.set();
  }
  run->stall.begin();
  Signal& free = run->awaited.try_emplace(id, parts_.context.cancel).first->second;
  co_await free.wait();
  const Nanoseconds since = run->stall.since();
  Trace* const trace = parts_.context.trace;
  if (run->stall.end() && trace != nullptr)
    trace->span(wait_track_, "updates wait for copies", since,
                parts_.context.reactor.clock().now());
}

/// Copies a record to spare memory. If that fails, the copy fails, and not the sweep.
Task<> RecordCopier::set_aside(RunPtr run, ChunkId id) {
  const std::uint64_t size = parts_.context.table.chunk(id).record_bytes();
  take(*run, id);
  run->spare_used += size;
  ++run->setting_aside;
  try {
    SetAside its{.chunk = id, .record = run->spare.take(size)};
    co_await fill(*run, id, its.record.span());
    run->set_aside.push_back(std::move(its));
  } catch (...) {
    copied(*run, id);
    give_up(*run, std::current_exception());
  }
  --run->setting_aside;
  run->wake.set();
}

Error RecordCopier::stalled_too_long(const Request& request) {
  const bool paced = request.bandwidth_bytes_per_s > 0;
  return {ErrorCode::kDeadlineExceeded,
          fmt::format(
              "training has waited {:g} s for the save, as long as `checkpoint_stall_max` allows, "
              "because the drive is too slow or hangs{}. Training goes on without this checkpoint. "
              "Save less often or to a faster drive, or raise `checkpoint_stall_max`",
              request.stall_max_s, paced ? ", or `checkpoint_bandwidth` is too small" : "")};
}

}  // namespace ziggurat
