// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_sweep.cc: when a chunk is worked on, and what becomes of a
// guess at the step's scalars. What is done to a chunk is in optimizer_chunk.cc, the end of a
// generation in optimizer_seal.cc.
#include "core/schedule/optimizer/optimizer_sweep.h"

#include <utility>

#include "base/check.h"
#include "core/schedule/optimizer/optimizer_pass.h"

namespace ziggurat {

OptimizerSweep::OptimizerSweep(Context& context, Parts parts, Settings settings,
                               std::uint64_t generation)
    : context_(context),
      parts_(std::move(parts)),
      settings_(std::move(settings)),
      durable_generation_(generation),
      written_generation_(context.table.chunks().size(), generation) {
  for (std::size_t i = 0; i < context.table.chunks().size(); ++i) {
    written_.emplace_back(context.reactor);
  }
}

void OptimizerSweep::begin(std::uint64_t generation) {
  if (current_ && current_->generation == generation) return;
  ZIGGURAT_CHECK(!current_ || current_->ended.is_set(), "generation {} begins inside {}",
                 generation, current_->generation);
  auto pass = std::make_shared<Pass>(context_.reactor, generation, context_.table);
  pass->previous = std::exchange(current_, pass);
}

void OptimizerSweep::gradient_started(UnitId unit, std::uint64_t generation,
                                      const EarlyStep* early) {
  begin(generation);
  const PassPtr pass = current_;
  if (early == nullptr) {
    read_ahead(pass);
    return;
  }
  if (!pass->early) {
    ZIGGURAT_CHECK(early->certain || !parts_.records.resident(),
                   "a guess at the scalars of generation {}, whose records are overwritten",
                   generation);
    pass->early = true;
    pass->certain = early->certain;
    pass->step = early->step;
    pass->scalars.set();
    if (!early->certain) {
      pass->guessed_at = monotonic_now();
      context_.metrics.add(Counter::kSpeculations, 1);
    }
  }
  const UnitChunks& chunks = context_.table.unit(unit);
  for (std::uint32_t i = 0; i < chunks.chunk_count; ++i)
    start_chunk(pass, chunks.first_chunk + i, {});
  read_ahead(pass);
}

void OptimizerSweep::end_step(const StepScalars& step, std::vector<std::byte> blob) {
  const PassPtr pass = current_;
  ZIGGURAT_CHECK(pass != nullptr && !pass->ended.is_set(), "a step without gradients");
  if (pass->early && !pass->certain) {
    if (pass->step != step) refute(*pass);
    trace_guess(*pass);
  } else if (pass->early) {
    ZIGGURAT_CHECK(pass->step == step, "generation {}: its certain scalars changed",
                   pass->generation);
  }
  pass->step = step;
  pass->certain = true;
  for (const ChunkId id : std::exchange(pass->guessed, {})) updated(*pass, id);
  if (!pass->scalars.is_set()) pass->scalars.set();
  pass->blob = std::move(blob);
  pass->ended.set();
  for (ChunkId id = 0; id < context_.table.chunks().size(); ++id) start_chunk(pass, id, {});
}

Task<> OptimizerSweep::skip_step() {
  const PassPtr pass = current_;
  ZIGGURAT_CHECK(pass != nullptr && !pass->ended.is_set() && !pass->certain,
                 "there is no step to skip, or it was certain");
  pass->skipped = true;
  if (pass->early) {
    refute(*pass);
    trace_guess(*pass);
  }
  if (!pass->scalars.is_set()) pass->scalars.set();
  pass->ended.set();
  co_await pass->idle.wait();
  current_ = pass->previous;
  for (ChunkId id = 0; id < context_.table.chunks().size(); ++id) {
    parts_.grads.drop(id);
    parts_.flow.arrived(id).reset();
  }
}

void OptimizerSweep::start_chunk(const PassPtr& pass, ChunkId id, Lease lease) {
  if (pass->started[id]) return;
  pass->started[id] = true;
  if (pass->under_way++ == 0) pass->idle.reset();
  context_.spawn(update_chunk(pass, id, std::move(lease)));
}

/// Starts chunks that wait for their gradient, or for the norm, as far as work items lie idle: no
/// more than fit beside all gradients, so that no gradient takes one back. In the order of need:
/// forward's, or with early scalars that of the gradients to come. Backward is taken to be forward
/// reversed; where it is not, a chunk waits longer with what it has read.
void OptimizerSweep::read_ahead(const PassPtr& pass) {
  if (parts_.records.resident() || pass->ended.is_set()) return;
  if (pass->previous && !pass->previous->updated.is_set()) return;
  const auto count = static_cast<ChunkId>(context_.table.chunks().size());
  for (; pass->ahead < count; ++pass->ahead) {
    const ChunkId id = pass->early ? count - 1 - pass->ahead : pass->ahead;
    if (pass->started[id]) continue;
    Lease lease;
    if (!parts_.kept.keeps(id)) {
      if (items_out_ >= settings_.work_items) return;
      if (written_generation_[id] + 1 < pass->generation) return;
      LeaseRequest behind_all = request(*pass, id);
      behind_all.need.position += kFirstRecordPosition;
      lease = context_.pool.try_acquire(behind_all);
      if (!lease) return;
      ++items_out_;
    }
    start_chunk(pass, id, std::move(lease));
  }
}

Task<> OptimizerSweep::update_chunk(PassPtr pass, ChunkId id, Lease lease) {
  // With its leases this pass may wait for the seal of the one before, whose every chunk must have
  // its own by then.
  if (pass->previous) co_await pass->previous->updated.wait();
  while (written_generation_[id] + 1 < pass->generation) {
    if (error_) std::rethrow_exception(error_);
    written_[id].reset();
    co_await written_[id].wait();
  }
  Item item{.lease = std::move(lease)};
  const bool made = co_await make_record(*pass, id, item);
  release(item);
  if (made) {
    if (parts_.kept.keeps(id)) parts_.kept.set_holds(id, pass->generation);
    written_generation_[id] = pass->generation;
    if (!error_) written_[id].set();
    if (--pass->records_left == 0) co_await seal(pass);
  }
  if (--pass->under_way == 0 && !error_) pass->idle.set();
}

/// From gradient to written record, again if that was done with a wrong guess; false if the step is
/// skipped. Two writes of one record follow each other, because this is their only place.
Task<bool> OptimizerSweep::make_record(Pass& pass, ChunkId id, Item& item) {
  const std::uint64_t record_bytes = context_.table.chunk(id).record_bytes();
  bool guessed = false;
  for (;;) {
    if (pass.skipped && !guessed) co_return false;
    // Where a guess was written, the parameter at home is no longer what the record began with.
    co_await prepare(pass, id, item, /*whole=*/guessed);
    if (pass.skipped) {
      if (guessed) co_await restore(pass, id, item);
      co_return false;
    }
    const std::uint32_t attempt = pass.attempt;
    std::uint64_t hash = 0;
    co_await update(pass, id, item, hash);
    bool wrote = false;
    if (attempt == pass.attempt) {
      if (pass.certain) {
        updated(pass, id);
      } else {
        pass.guessed.push_back(id);
      }
      wrote = co_await write(pass, id, item, hash);
      release(item);
      if (!pass.certain) co_await pass.ended.wait();
      if (attempt == pass.attempt) co_return true;
    }
    guessed = true;
    context_.metrics.add(Counter::kSpeculationWasteBytes, record_bytes * (wrote ? 2 : 1));
  }
}

/// The chunk's parameters are those of the generation being made, and nothing can change that.
void OptimizerSweep::updated(Pass& pass, ChunkId id) {
  parts_.grads.drop(id);
  if (!error_) parts_.flow.arrived(id).reset();
  const UnitId unit = context_.table.chunk(id).unit;
  if (--pass.unit_chunks_left[unit] == 0) parts_.unit_updated(unit, pass.generation);
  if (--pass.chunks_left == 0 && !error_) pass.updated.set();
}

/// The guess was wrong: whatever was made with it is nothing.
void OptimizerSweep::refute(Pass& pass) {
  ++pass.attempt;
  pass.guessed.clear();
  context_.metrics.add(Counter::kSpeculationsRedone, 1);
  // Before that no record of this generation was written.
  if (!pass.previous || pass.previous->done.is_set())
    parts_.store.discard(pass.generation + settings_.store_offset);
}

void OptimizerSweep::trace_guess(const Pass& pass) {
  Trace* trace = context_.trace;
  if (trace == nullptr) return;
  if (guess_track_ < 0) guess_track_ = trace->track("speculation");
  trace->span(guess_track_, pass.attempt == 0 ? "kept" : "made again", pass.guessed_at,
              monotonic_now(), static_cast<std::int64_t>(pass.generation));
}

void OptimizerSweep::fail(std::exception_ptr error) {
  error_ = error;
  for (Signal& signal : written_) signal.fail(error);
  for (PassPtr pass = current_; pass; pass = pass->previous) {
    for (Signal* signal : {&pass->scalars, &pass->updated, &pass->ended, &pass->idle, &pass->done})
      signal->fail(error);
  }
}

}  // namespace ziggurat
