// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_chunk.cc: the work on one chunk in a sweep: takes a lease,
// reads the record, waits for gradient and scalars, updates, publishes the parameters and writes
// the record.
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/numerics/typed_value.h"
#include "core/schedule/optimizer/optimizer_pass.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/stored_record.h"

namespace ziggurat {
namespace {

/// Returns the host memory traffic of a chunk's update: its record, gradient and parameters.
std::uint64_t update_bytes(const Chunk& chunk) {
  return 2 * chunk.record_bytes() + 2 * chunk.param_bytes();
}

}  // namespace

std::uint64_t OptimizerSweep::not_read_bytes(const ChunkTable& table, const Chunk& chunk,
                                             bool in_memory) {
  if (!in_memory || table.is_packed(chunk.unit)) return 0;
  const StateFormat format = table.state().format;
  const bool skips =
      table.is_lent() ? begins_with_param(format, table.dtype(chunk.unit)) : holds_param(format);
  return skips ? chunk.param_bytes() : 0;
}

LeaseRequest OptimizerSweep::request(const Pass& pass, ChunkId id) const {
  return {.purpose = Purpose::kOptimizer,
          .size_bytes = WorkMemory::lease_bytes(parts_.homes, context_.table, id),
          .need = {.generation = pass.generation, .position = kFirstRecordPosition + place_[id]},
          .holder = "optimizer chunk",
          .numa_node = context_.node_of(id)};
}

/// Returns once the chunk may be updated: its record is in work memory, its gradient is at home,
/// and the step's scalars are known. Until then the record is clean, so the pool may take the lease
/// back for a more urgent request. In that case the record is read again.
Task<> OptimizerSweep::prepare(Pass& pass, ChunkId id, Item& item, bool whole) {
  for (;;) {
    const std::uint64_t read_bytes = co_await read(pass, id, item, whole);
    const bool kept = co_await wait_for_gradient(pass, id, item);
    if (kept) co_return;
    context_.metrics.add(Counter::kStateReadAgainBytes, read_bytes);
  }
}

/// Reads the record of the previous generation from where it is. The parameter in the record is not
/// read if it is at home, unless `whole` is set. Returns how many bytes were read from NVMe.
Task<std::uint64_t> OptimizerSweep::read(Pass& pass, ChunkId id, Item& item, bool whole) {
  RecordHome& records = parts_.homes.records;
  const LeaseRequest wanted = request(pass, id);
  if (!item.lease && wanted.size_bytes > 0) {
    item.lease = co_await context_.pool.acquire(wanted);
    ++items_out_;
  }
  item.memory = WorkMemory::of(parts_.homes, context_.table, id, item.lease.bytes());
  const Chunk& chunk = context_.table.chunk(id);
  const bool on_device = records.updated_on_device(id);
  const std::uint64_t skipped =
      whole || on_device
          ? 0
          : not_read_bytes(context_.table, chunk, parts_.homes.params.in_memory(chunk.unit));
  const std::uint64_t wanted_bytes = chunk.record_bytes() - skipped;
  item.known = records.holds(id, pass.generation - 1);
  item.unmade = !item.known && is_unmade(id);
  item.param_not_read = !item.known && !item.unmade && skipped > 0;
  if (item.unmade) co_return 0;
  if (item.known) {
    if (!records.through_store()) co_return 0;
    context_.metrics.add(Counter::kRecordCacheHits, 1);
    context_.metrics.add(Counter::kRecordCacheHitBytes, wanted_bytes);
    co_return 0;
  }
  const std::uint64_t stored = stored_in_[id];
  co_await parts_.store->read(id, stored, item.memory.record, IoPriority::kPrefetch, skipped);
  context_.metrics.add(Counter::kStateReadBytes, wanted_bytes);
  if (on_device) {
    co_await require_record_of(context_, *parts_.store, id, stored, item.memory.record);
    co_await records.bring_home(id, item.memory.record);
    records.set_holds(id, pass.generation - 1);
    item.known = true;
  }
  co_return wanted_bytes;
}

/// Returns false if the pool has taken the lease back meanwhile.
Task<bool> OptimizerSweep::wait_for_gradient(Pass& pass, ChunkId id, Item& item) {
  Signal& arrived = parts_.homes.grads.arrived(id);
  bool taken = false;
  PinnedPool::ReclaimId offer = 0;
  if (item.lease && !(arrived.is_set() && pass.scalars.is_set())) {
    const Need need{.generation = pass.generation, .position = kFirstRecordPosition + place_[id]};
    offer = context_.pool.offer(item.lease, need, [this, &item, &taken] {
      taken = true;
      item.lease.reset();
      --items_out_;
    });
  }
  std::exception_ptr error;
  try {
    co_await arrived.wait();
    co_await pass.scalars.wait();
  } catch (...) {
    error = std::current_exception();
  }
  if (offer != 0 && !taken) context_.pool.withdraw(offer);
  if (error) std::rethrow_exception(error);
  co_return !taken;
}

/// Makes the new parameters at home from record and gradient. `hash` becomes the hash of the new
/// record. Without a gradient the record stays as it is.
Task<> OptimizerSweep::update(Pass& pass, ChunkId id, Item& item, std::uint64_t& hash) {
  const std::shared_ptr<const StepScalars> steps = pass.step;
  if (parts_.homes.records.stays(id)) {
    if (parts_.watch != nullptr) co_await parts_.watch->before_change(id, pass.generation);
    // Called before anything is awaited: from here on nobody may take the memory for the old
    // record.
    parts_.homes.records.forget(id);
  }
  if (parts_.homes.records.updated_on_device(id)) {
    co_await update_on_device(pass, id, item, *steps, hash);
    co_return;
  }
  if (item.unmade) {
    co_await make_from_params(id, item.memory);
    item.known = true;
  }
  const Effect effect = effect_of(id, *steps);
  const std::shared_ptr<const StateWrites::Arrays> writes =
      parts_.writes != nullptr ? parts_.writes->of(id) : nullptr;
  // The whole record is needed: the parameter at home is not the one in the record, or is not
  // enough alone.
  if ((!effect.stepped || effect.written || writes != nullptr) && item.param_not_read)
    co_await read(pass, id, item, /*whole=*/true);
  if (writes != nullptr) co_await apply_writes(pass, id, item, *writes);
  if (effect.written || context_.table.is_packed(context_.table.chunk(id).unit))
    co_await parts_.homes.params.bring(id, item.memory.param, effect.taken);
  RecordView view = view_of(id, item);
  view.masters_from_param = effect.written;
  if (effect.stepped) view.grad = co_await parts_.homes.grads.fetch(id, item.memory.grad);
  co_await make_step(pass, id, item, *steps, view, effect, hash);
  if (effect.stepped) co_await parts_.homes.params.publish(id, view.param, effect.made);
  if (writes == nullptr) co_return;
  co_await publish_masters(pass, id, item);
  parts_.writes->forget(id);
}

/// The masters are the parameters at home.
Task<> OptimizerSweep::make_from_params(ChunkId id, const WorkMemory& memory) {
  const std::vector<ParamRun> runs = context_.table.param_runs(id);
  const LentMemory::Use its(context_.lent);
  co_await parts_.homes.params.bring(id, memory.param, runs);
  const TypedSpan<std::byte> params = parts_.homes.params.destination(id, memory.param);
  const StateKind kind = context_.table.state(id);
  const std::function<void()> job = [&] {
    std::vector<float> masters(context_.table.chunk(id).count);
    for (const ParamRun& run : runs) {
      for (std::uint64_t i = run.begin; i < run.begin + run.count; ++i)
        masters[i] = value_at(params.dtype, params.bytes.data(), i);
    }
    write_record(kind, masters, memory.record, settings_.initial_accumulator);
  };
  co_await context_.run_near(id, {"initialize", params.bytes.size() + memory.record.size()}, job);
}

OptimizerSweep::Effect OptimizerSweep::effect_of(ChunkId id, const StepScalars& steps) const {
  const ChunkTable& table = context_.table;
  const GradHome& grads = parts_.homes.grads;
  const std::span<const DecayRun> runs = table.decay_runs(id);
  if (!table.is_packed(table.chunk(id).unit)) {
    const bool written = steps[runs.front().group].params_written;
    return {.stepped = !grads.absent(id), .written = written};
  }
  Effect effect{.runs = {runs.begin(), runs.end()}};
  const std::vector<ParamRun> params = table.param_runs(id);
  auto param = params.begin();
  for (DecayRun& run : effect.runs) {
    run.skipped = run.keeps_masters = true;  // padding is
    if (param == params.end() || param->begin != run.begin) continue;
    run.skipped = grads.absent(*param);
    run.keeps_masters = !steps[run.group].params_written;
    if (!run.skipped) effect.made.push_back(*param);
    if (!run.keeps_masters) effect.taken.push_back(*param);
    ++param;
  }
  effect.stepped = !effect.made.empty();
  effect.written = !effect.taken.empty();
  return effect;
}

/// Puts what a trainer wrote into the record of the previous generation. The record is verified
/// first, because its hash changes.
Task<> OptimizerSweep::apply_writes(const Pass& pass, ChunkId id, Item& item,
                                    const StateWrites::Arrays& writes) {
  ZIGGURAT_CHECK(!pass.guesses, "generation {}: state is written under a guess", pass.generation);
  const std::span<std::byte> record = view_of(id, item).record;
  if (!item.known) co_await require_record_of(context_, *parts_.store, id, stored_in_[id], record);
  item.known = true;
  parts_.homes.records.forget(id);
  const std::function<void()> job = [&] {
    StateWrites::apply(context_.table.state(id), writes, record);
  };
  co_await context_.run_near(id, {"write state", record.size()}, job);
}

/// Makes those parameters from their masters that were written, or whose count of steps was. Where
/// a step was made, it has made them; elsewhere the parameters at home belong to the old masters.
Task<> OptimizerSweep::publish_masters(const Pass& pass, ChunkId id, const Item& item) {
  std::vector<ParamRun> runs = context_.table.param_runs(id);
  std::erase_if(runs, [&](const ParamRun& run) {
    return !parts_.homes.grads.absent(run) || !parts_.writes->publishes(id, run);
  });
  if (runs.empty()) co_return;
  co_await parts_.homes.params.publish_record(id, parts_.param_steps(pass.generation),
                                              item.memory.record, item.memory.param, runs);
}

/// Returns a view of all parts but the gradient.
RecordView OptimizerSweep::view_of(ChunkId id, const Item& item) const {
  return {.format = context_.table.state().format,
          .own_blocks = context_.table.state(id).own_blocks,
          .record = item.memory.record,
          .param = parts_.homes.params.destination(id, item.memory.param),
          .param_not_read = item.param_not_read,
          .first_element = context_.table.first_element(id)};
}

/// Updates the record on a worker. If its hash is not known to be right, compares it with the
/// store's.
Task<> OptimizerSweep::make_step(const Pass& pass, ChunkId id, const Item& item,
                                 const StepScalars& steps, const RecordView& view,
                                 const Effect& effect, std::uint64_t& hash) {
  const bool hashed = writes(pass, id);
  if (!hashed && view.grad.bytes.empty() && !view.masters_from_param) co_return;
  StateStore::Expected expected{};
  UpdateHashing hashing{.verify = !item.known, .seed_before = 0, .seed_after = 0};
  if (hashing.verify) {
    expected = parts_.store->expected(id, stored_in_[id]);
    hashing.seed_before = expected.seed;
  }
  if (hashed) hashing.seed_after = parts_.store->write_seed(id, pass.stored);
  parts_.homes.records.forget(id);
  UpdateHashes hashes{.before = expected.hash, .after = 0};  // what is found if all is well
  const std::function<void()> job = [&] {
    const CountedTime busy(context_.reactor.clock(), context_.metrics, Counter::kOptimizerCpuNs);
    const std::span<const DecayRun> runs =
        effect.runs.empty() ? context_.table.decay_runs(id) : std::span(effect.runs);
    hashes = update_record(steps, view, runs, hashed || hashing.verify ? &hashing : nullptr);
  };
  {
    const LentMemory::Use gradient_and_param(context_.lent);
    const Work work{.name = "update record",
                    .bytes = update_bytes(context_.table.chunk(id)),
                    .read = view.grad.bytes,
                    .written = view.record,
                    .also_written = view.param.bytes};
    co_await context_.run_near(id, work, job);
  }
  context_.metrics.add(Counter::kOptimizerBytes, update_bytes(context_.table.chunk(id)));
  if (hashing.verify && hashes.before != expected.hash) {
    if (item.param_not_read) co_await require_param_untouched(id, stored_in_[id], item);
    throw parts_.store->corrupt_record(id, stored_in_[id]);
  }
  hash = hashes.after;
}

/// Updates the record on the device. If the record is to be written, it is then copied to host
/// memory, where it is hashed and from where it is written.
Task<> OptimizerSweep::update_on_device(const Pass& pass, ChunkId id, const Item& item,
                                        const StepScalars& steps, std::uint64_t& hash) {
  if (!parts_.homes.grads.absent(id)) co_await step_on_device(id, item, steps);
  if (!writes(pass, id)) co_return;
  co_await parts_.homes.records.fetch(id, item.memory.record);
  const std::uint64_t seed = parts_.store->write_seed(id, pass.stored);
  hash = co_await hash_record(context_, id, item.memory.record, seed);
}

Task<> OptimizerSweep::step_on_device(ChunkId id, const Item& item, const StepScalars& steps) {
  const StateHomes& homes = parts_.homes;
  ZIGGURAT_CHECK(!context_.table.state(id).own_blocks, "chunk {}: a shared record on a device", id);
  homes.records.forget(id);
  Task<DeviceStaging::Item> taking = parts_.staging.take();
  DeviceStaging::Item staging = co_await std::move(taking);
  Compute::Update step{.steps = steps,
                       .format = context_.table.state().format,
                       .record = homes.records.on_device(id),
                       .grad = {},
                       .param = homes.params.destination_on_device(id, staging.param),
                       .first_element = context_.table.first_element(id),
                       .runs = context_.table.decay_runs(id)};
  step.grad = co_await homes.grads.fetch_to_device(id, item.memory.grad, staging.grad);
  co_await context_.compute->update(step);
  co_await homes.params.publish_from_device(id, step.param, item.memory.param);
  parts_.staging.give_back(std::move(staging));
  context_.metrics.add(Counter::kOptimizerBytes, update_bytes(context_.table.chunk(id)));
}

/// Finds out why a record that was read without its parameter has a wrong hash. If the record on
/// the drive is undamaged, the parameter was changed in memory, and this throws.
Task<> OptimizerSweep::require_param_untouched(ChunkId id, std::uint64_t stored,
                                               const Item& item) const {
  const std::span<std::byte> record = item.memory.record;
  co_await parts_.store->read(id, stored, record);
  const bool whole = co_await is_record_of(context_, *parts_.store, id, stored, record);
  if (!whole) co_return;
  const UnitId unit = context_.table.chunk(id).unit;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("'{}' was changed since the last step, but the engine was not told: its "
                          "value in memory differs from the store's, which is undamaged. Announce "
                          "such a change before the step (in PyTorch, write the parameter in place "
                          "under torch.no_grad(); the engine does not notice writes through .data)",
                          context_.table.model().units[unit].name));
}

/// Makes the parameters at home from the record of the previous generation, which the item holds
/// because it was read again.
Task<> OptimizerSweep::restore(Pass& pass, ChunkId id, Item& item) {
  co_await require_record_of(context_, *parts_.store, id, stored_in_[id], item.memory.record);
  co_await parts_.homes.params.publish_record(id, {.generation = pass.generation - 1},
                                              item.memory.record, item.memory.param, {});
  parts_.homes.records.set_holds(id, pass.generation - 1);
}

Task<> OptimizerSweep::write(Pass& pass, ChunkId id, const Item& item, std::uint64_t hash) {
  if (!writes(pass, id)) co_return;
  // The generation before must be durable before any byte of this one is written, because a crash
  // falls back to its slots.
  if (pass.previous) co_await pass.previous->done.wait();
  if (parts_.watch != nullptr)
    co_await parts_.watch->before_write(id, pass.generation, pass.stored);
  const std::span<const std::byte> record = item.memory.record;
  // Reads wait for shared work items, so records in shared items are written first. A record with
  // an item of its own only has to become durable.
  const IoPriority priority =
      parts_.homes.records.has_own_item(id) ? IoPriority::kDurable : IoPriority::kWriteBack;
  co_await parts_.store->write(id, pass.stored, record, hash, priority);
  context_.metrics.add(Counter::kStateWriteBytes, record.size());
}

void OptimizerSweep::release(Item& item) {
  if (!item.lease) return;
  item.lease.reset();
  --items_out_;
  read_ahead(current_);
}

}  // namespace ziggurat
