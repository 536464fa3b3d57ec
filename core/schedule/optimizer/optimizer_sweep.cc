// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_sweep.cc: decides when a chunk is worked on, and what happens
// after a guess at the step's scalars. The work on one chunk is in optimizer_chunk.cc, and the end
// of a generation in optimizer_seal.cc.
#include "core/schedule/optimizer/optimizer_sweep.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "base/check.h"
#include "core/schedule/optimizer/optimizer_pass.h"

namespace ziggurat {
namespace {

/// The number of chunks that are begun before there is a work item for them, so that no work item
/// is ever idle.
constexpr std::size_t kBegunAhead = 4;

/// Returns the chunks in the order in which a forward needs what they update: the table's, but
/// where a trainer acquires units, those of its first unit come first. A unit may have parameters
/// from both ends of the model, such as those of no layer.
std::vector<ChunkId> forward_order(const ChunkTable& table) {
  const auto acquired = [&](ChunkId id) {
    const std::optional<std::uint32_t> unit =
        table.model().units[table.chunk(id).unit].params.front().streamed;
    return unit ? std::int64_t{*unit} : -1;  // what the trainer has itself is waited for at once
  };
  std::vector<ChunkId> order(table.chunks().size());
  std::iota(order.begin(), order.end(), ChunkId{0});
  std::ranges::stable_sort(order, {}, acquired);
  return order;
}

}  // namespace

OptimizerSweep::OptimizerSweep(Context& context, Parts parts, Settings settings,
                               std::uint64_t generation)
    : context_(context),
      parts_(std::move(parts)),
      settings_(std::move(settings)),
      order_(forward_order(context.table)),
      place_(order_.size()),
      chunks_at_once_(settings_.work_items + 2 * context.workers.threads() + kBegunAhead),
      durable_generation_(parts_.store != nullptr ? generation : 0),
      written_generation_(context.table.chunks().size(), generation),
      stored_in_(context.table.chunks().size(),
                 parts_.store != nullptr ? parts_.store->durable_generation() : 0),
      next_stored_(parts_.store != nullptr && !settings_.unsealed
                       ? parts_.store->durable_generation() + 1
                       : 0) {
  for (ChunkId id = 0; id < context.table.chunks().size(); ++id) {
    written_.emplace_back(context.cancel);
    if (settings_.unmade && id < context.table.stored_chunks().size()) stored_in_[id] = kUnmade;
    place_[order_[id]] = id;
  }
}

void OptimizerSweep::begin(std::uint64_t generation) {
  if (current_ && current_->generation == generation) return;
  ZIGGURAT_CHECK(!current_ || current_->ended.is_set(), "generation {} begins inside {}",
                 generation, current_->generation);
  auto pass = std::make_shared<Pass>(context_.cancel, generation, context_.table);
  pass->previous = std::exchange(current_, pass);
}

/// Chooses the store's generation for the pass. Between seals the records of one step overwrite
/// those of the previous step.
void OptimizerSweep::give_place(Pass& pass) {
  pass.stored = next_stored_;
  pass.seals = settings_.seal_every > 0 && pass.generation % settings_.seal_every == 0;
  fresh_ = pass.seals;
  if (pass.seals) ++next_stored_;
}

/// Whether the record is written in this pass. One that stays in memory is written only for a seal.
bool OptimizerSweep::writes(const Pass& pass, ChunkId id) const {
  return pass.seals || !parts_.homes.records.stays(id);
}

bool OptimizerSweep::can_guess() const {
  return parts_.homes.records.through_store() && parts_.store->state().slots == 2 && fresh_;
}

std::uint64_t OptimizerSweep::storing() const noexcept {
  const Pass* newest = current_.get();
  if (newest != nullptr && newest->state == Pass::State::kOpen) newest = newest->previous.get();
  if (newest != nullptr) return newest->stored;
  return parts_.store != nullptr ? parts_.store->durable_generation() : 0;
}

bool OptimizerSweep::step_open() const { return current_ && current_->state == Pass::State::kOpen; }

bool OptimizerSweep::step_sealing() const {
  for (PassPtr pass = step_open() ? current_->previous : current_; pass; pass = pass->previous)
    if (pass->seals && !pass->done.is_set()) return true;
  return false;
}

void OptimizerSweep::gradient_started(UnitId unit, std::uint64_t generation,
                                      const StepScalars* guess) {
  begin(generation);
  const PassPtr pass = current_;
  if (guess == nullptr) {
    read_ahead(pass);
    return;
  }
  if (!pass->guesses) {
    ZIGGURAT_CHECK(can_guess(), "generation {}: a guess that could not be taken back", generation);
    pass->guesses = true;
    give_place(*pass);
    pass->step = std::make_shared<const StepScalars>(*guess);
    pass->scalars.set();
    pass->guessed_at = context_.reactor.clock().now();
    context_.metrics.add(Counter::kSpeculations, 1);
  }
  const UnitChunks& chunks = context_.table.unit(unit);
  pass->due.push_back({chunks.first_chunk, chunks.first_chunk + chunks.chunk_count});
  start_more(pass);
  read_ahead(pass);
}

void OptimizerSweep::end_step(const StepScalars& step, std::optional<std::vector<std::byte>> blob) {
  context_.cancel.check();
  ZIGGURAT_CHECK(step_open(), "a step without gradients");
  const PassPtr pass = current_;
  const bool right = !pass->guesses || *pass->step == step;
  pass->state = right ? Pass::State::kEarned : Pass::State::kCorrected;
  if (!pass->guesses) give_place(*pass);
  if (!right) refute(*pass);
  trace_guess(*pass);
  pass->step = std::make_shared<const StepScalars>(step);
  for (const ChunkId id : std::exchange(pass->guessed, {})) updated(*pass, id);
  if (!pass->scalars.is_set()) pass->scalars.set();
  if (blob) give_blob(std::move(*blob));
  pass->ended.set();
  for (ChunkId id = 0; right && id < pass->stages.size(); ++id) {
    if (pass->stages[id] != Pass::Stage::kGuessed) continue;
    pass->stages[id] = Pass::Stage::kEnded;
    if (record_made(*pass, id)) context_.spawn(seal(pass));
  }
  pass_constants(pass);
  start_more(pass);
}

void OptimizerSweep::give_blob(std::vector<std::byte> blob) {
  // If gradients of the next step are on their way already, the newest pass is not the one that has
  // ended.
  const PassPtr pass = step_open() ? current_->previous : current_;
  pass->blob = std::move(blob);
  pass->blob_given.set();
}

/// Ends the pass for constant chunks, which are at the new generation as soon as the verdict is
/// known.
void OptimizerSweep::pass_constants(const PassPtr& pass) {
  for (UnitId u = 0; u < context_.table.unit_count(); ++u) {
    if (context_.table.unit(u).updated_count == 0) parts_.unit_updated(u, pass->generation);
  }
  if (context_.table.updated_count() > 0) return;
  pass->updated.set();
  context_.spawn(seal(pass));
}

Task<> OptimizerSweep::undo_step() {
  context_.cancel.check();
  ZIGGURAT_CHECK(step_open(), "there is no step to undo");
  const PassPtr pass = current_;
  pass->state = Pass::State::kUndone;
  if (pass->guesses) refute(*pass);
  trace_guess(*pass);
  if (!pass->scalars.is_set()) pass->scalars.set();
  pass->ended.set();
  start_more(pass);
  co_await pass->idle.wait();
  current_ = pass->previous;
  if (pass->guesses) {
    next_stored_ = pass->stored;
    fresh_ = true;
  }
  for (ChunkId id = 0; id < context_.table.chunks().size(); ++id) {
    parts_.homes.grads.drop(id);
    parts_.homes.grads.arrived(id).reset();
  }
}

void OptimizerSweep::start_chunk(const PassPtr& pass, ChunkId id, Lease lease) {
  const bool again = pass->stages[id] == Pass::Stage::kGuessed;
  pass->stages[id] = Pass::Stage::kUnderWay;
  if (pass->under_way++ == 0) pass->idle.reset();
  ++pass->begun;
  context_.spawn(again ? remake_chunk(pass, id) : update_chunk(pass, id, std::move(lease)));
}

/// Starts as many chunks as there is room for. No chunk waits for another one, of this pass or
/// another: each ends by itself.
void OptimizerSweep::start_more(const PassPtr& pass) {
  while (pass->begun < chunks_at_once_) {
    const std::optional<ChunkId> id = next_chunk(*pass);
    if (!id) return;
    if (!carry(pass, *id)) start_chunk(pass, *id, {});
  }
}

/// Ends a chunk at once if the step leaves it as it is, in memory: nothing of it has a gradient or
/// was written. Thousands of experts may have none in a step.
bool OptimizerSweep::carry(const PassPtr& pass, ChunkId id) {
  const RecordHome& records = parts_.homes.records;
  const bool unchanged =
      pass->state == Pass::State::kEarned && pass->stages[id] == Pass::Stage::kWaiting &&
      !writes(*pass, id) && !watched() && records.holds(id, pass->generation - 1) &&
      parts_.homes.grads.absent(id) && (parts_.writes == nullptr || !parts_.writes->of(id));
  if (!unchanged || effect_of(id, *pass->step).written) return false;
  pass->stages[id] = Pass::Stage::kEnded;
  updated(*pass, id);
  if (record_made(*pass, id)) context_.spawn(seal(pass));
  return true;
}

/// Returns the next chunk to begin, or none if nothing is left. While the pass is open these are
/// chunks of units whose gradients are on their way, in the order of units; after the verdict, all
/// chunks in forward order.
std::optional<ChunkId> OptimizerSweep::next_chunk(Pass& pass) const {
  if (context_.cancel.cancelled()) return std::nullopt;
  switch (pass.state) {
    case Pass::State::kOpen:
      for (; !pass.due.empty(); pass.due.pop_front()) {
        for (Pass::ChunkRange& range = pass.due.front(); range.next < range.end;) {
          const ChunkId id = range.next++;
          if (pass.stages[id] == Pass::Stage::kWaiting) return id;
        }
      }
      return std::nullopt;
    case Pass::State::kEarned:
    case Pass::State::kCorrected:
    case Pass::State::kUndone:
      for (; pass.next < order_.size(); ++pass.next) {
        const ChunkId id = order_[pass.next];
        const Pass::Stage stage = pass.stages[id];
        if (stage == Pass::Stage::kGuessed && pass.refuted()) return id;
        if (stage == Pass::Stage::kWaiting && pass.state != Pass::State::kUndone) return id;
      }
      return std::nullopt;
  }
  return std::nullopt;
}

/// Starts chunks that must wait for their gradient or for the norm, while there are idle work
/// items: only as many as fit beside all gradients, so that no gradient has to take an item back.
/// They are started in the order in which they are needed: forward order, or with a guess the order
/// of the gradients to come. Backward is assumed to be forward reversed; if it is not, a chunk just
/// holds its record longer.
void OptimizerSweep::read_ahead(const PassPtr& pass) {
  if (!parts_.homes.records.through_store() || pass->state != Pass::State::kOpen) return;
  if (pass->previous && !pass->previous->updated.is_set()) return;
  for (; pass->ahead < order_.size(); ++pass->ahead) {
    const ChunkId id = order_[pass->guesses ? order_.size() - 1 - pass->ahead : pass->ahead];
    // The record is in memory already if it stays there.
    if (pass->stages[id] != Pass::Stage::kWaiting || parts_.homes.records.stays(id)) continue;
    if (items_out_ >= settings_.work_items) return;
    if (written_generation_[id] + 1 < pass->generation) return;
    LeaseRequest behind_all = request(*pass, id);
    behind_all.need.position += kFirstRecordPosition;
    Lease lease = context_.pool.try_acquire(behind_all);
    if (!lease) return;
    ++items_out_;
    start_chunk(pass, id, std::move(lease));
  }
}

Task<> OptimizerSweep::update_chunk(PassPtr pass, ChunkId id, Lease lease) {
  // While this pass holds leases, it may wait for the seal of the pass before. So every chunk of
  // that pass must have its leases by then.
  if (pass->previous) co_await pass->previous->updated.wait();
  while (written_generation_[id] + 1 < pass->generation) {
    written_[id].reset();
    co_await written_[id].wait();
  }
  Item item{.lease = std::move(lease)};
  const bool made = co_await make_record(*pass, id, item);
  co_await end_chunk(pass, id, item, made);
}

/// Makes a chunk's record again, after the guess with which it was made has turned out wrong.
Task<> OptimizerSweep::remake_chunk(PassPtr pass, ChunkId id) {
  Item item;
  context_.metrics.add(Counter::kSpeculationWasteBytes,
                       2 * context_.table.chunk(id).record_bytes());
  const bool made = co_await judged_record(*pass, id, item, /*guessed=*/true);
  co_await end_chunk(pass, id, item, made);
}

/// Ends the work on a chunk. `made` is set if its record is the final record of the generation
/// being made.
Task<> OptimizerSweep::end_chunk(PassPtr pass, ChunkId id, Item& item, bool made) {
  release(item);
  const bool open = pass->state == Pass::State::kOpen;
  pass->stages[id] = open ? Pass::Stage::kGuessed : Pass::Stage::kEnded;
  if (made && record_made(*pass, id)) co_await seal(pass);
  --pass->under_way;
  leave(*pass, item);
  if (pass->under_way == 0) pass->idle.set();
}

/// Lets other chunks begin while the updated chunk is still written, if it has a work item of its
/// own and so takes none from them.
void OptimizerSweep::make_way(Pass& pass, ChunkId id, Item& item) {
  if (parts_.homes.records.has_own_item(id)) leave(pass, item);
}

void OptimizerSweep::leave(Pass& pass, Item& item) {
  if (!std::exchange(item.begun, false)) return;
  --pass.begun;
  start_more(pass.shared_from_this());
}

/// Notes that the record is made; returns true if it was the last one.
bool OptimizerSweep::record_made(Pass& pass, ChunkId id) {
  parts_.homes.records.set_holds(id, pass.generation);
  if (writes(pass, id) || is_unmade(id)) stored_in_[id] = pass.stored;
  written_generation_[id] = pass.generation;
  written_[id].set();
  return --pass.records_left == 0;
}

/// Makes a chunk's record and writes it; returns true once this is final. Returns false if the step
/// is still open, so that the record is a guess, or if the step is undone: then the record and the
/// parameters at home are the old ones. Two writes of one record cannot overlap, because no other
/// coroutine works on the chunk.
Task<bool> OptimizerSweep::make_record(Pass& pass, ChunkId id, Item& item) {
  co_await prepare(pass, id, item, /*whole=*/false);
  const bool guessed = pass.state == Pass::State::kOpen;
  if (guessed) co_await guess_record(pass, id, item);
  if (pass.state == Pass::State::kOpen) co_return false;
  co_return co_await judged_record(pass, id, item, guessed);
}

/// Does what is left to do for the chunk when the verdict is known.
Task<bool> OptimizerSweep::judged_record(Pass& pass, ChunkId id, Item& item, bool guessed) {
  // A refuted guess has changed the parameters at home, so they are no longer the ones with which
  // the old record begins.
  if (guessed && pass.refuted()) co_await read(pass, id, item, /*whole=*/true);
  switch (pass.state) {
    case Pass::State::kOpen: break;
    case Pass::State::kEarned:
      if (!guessed) co_await earned_record(pass, id, item);
      co_return true;
    case Pass::State::kCorrected: co_await earned_record(pass, id, item); co_return true;
    case Pass::State::kUndone:
      if (guessed) co_await restore(pass, id, item);
      co_return false;
  }
  ZIGGURAT_CHECK(false, "generation {}: no verdict on chunk {}", pass.generation, id);
  co_return false;
}

/// Updates the chunk with the scalars of a step that was judged good.
Task<> OptimizerSweep::earned_record(Pass& pass, ChunkId id, Item& item) {
  std::uint64_t hash = 0;
  co_await update(pass, id, item, hash);
  updated(pass, id);
  make_way(pass, id, item);
  const bool stays = parts_.homes.records.stays(id);
  if (parts_.watch != nullptr && !stays)
    co_await parts_.watch->made(id, pass.generation, item.memory.record);
  co_await write(pass, id, item, hash);
}

/// Updates the chunk and writes its record while the step may still be judged bad.
Task<> OptimizerSweep::guess_record(Pass& pass, ChunkId id, Item& item) {
  std::uint64_t hash = 0;
  co_await update(pass, id, item, hash);
  if (pass.state == Pass::State::kOpen) pass.guessed.push_back(id);
  if (pass.state == Pass::State::kEarned) updated(pass, id);
  make_way(pass, id, item);
  // The generation before must be durable before any byte of this one is written. Meanwhile the
  // guess may be refuted.
  if (!pass.refuted() && pass.previous) co_await pass.previous->done.wait();
  const bool counts = !pass.refuted();
  if (counts) co_await write(pass, id, item, hash);
  release(item);
  if (!pass.refuted()) co_return;
  const std::uint64_t record_bytes = context_.table.chunk(id).record_bytes();
  context_.metrics.add(Counter::kSpeculationWasteBytes, record_bytes * (counts ? 2 : 1));
}

/// Notes that the chunk's parameters are the final ones of the generation being made.
void OptimizerSweep::updated(Pass& pass, ChunkId id) {
  parts_.homes.grads.drop(id);
  parts_.homes.grads.arrived(id).reset();
  const UnitId unit = context_.table.chunk(id).unit;
  if (--pass.unit_chunks_left[unit] == 0) parts_.unit_updated(unit, pass.generation);
  if (--pass.chunks_left == 0) pass.updated.set();
}

/// Marks the guess as wrong, so that everything made with it is invalid.
void OptimizerSweep::refute(Pass& pass) {
  pass.guessed.clear();
  context_.metrics.add(Counter::kSpeculationsRedone, 1);
  // While the pass before is not done, no record of this generation can have been written.
  if (!pass.previous || pass.previous->done.is_set()) parts_.store->discard(pass.stored);
}

void OptimizerSweep::trace_guess(const Pass& pass) {
  Trace* trace = context_.trace;
  if (trace == nullptr || !pass.guesses) return;
  if (guess_track_ < 0) guess_track_ = trace->track("speculation");
  trace->span(guess_track_, pass.refuted() ? "made again" : "kept", pass.guessed_at,
              context_.reactor.clock().now(), static_cast<std::int64_t>(pass.generation));
}

}  // namespace ziggurat
