// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer_sweep.cc: the life of a chunk in a step: lease, read, gradient, norm,
// update, publish, write, seal.
#include "core/schedule/optimizer_sweep.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "tiers/record_hash.h"

namespace ziggurat {
namespace {

/// Records come after every gradient of their step: a gradient that waits for memory is what the
/// record waits for.
constexpr std::uint64_t kFirstRecordPosition = std::uint64_t{1} << 32;

/// Host memory traffic of a chunk's update: its record and 16 bits of gradient and parameter.
std::uint64_t update_bytes(const Chunk& chunk) {
  return 2 * chunk.record_bytes() + 2 * chunk.half_bytes();
}

/// Records written at once by a checkpoint.
constexpr std::size_t kCheckpointBatch = 8;

}  // namespace

struct OptimizerSweep::Pass {
  Pass(Reactor& reactor, std::uint64_t made, const ChunkTable& table)
      : generation(made),
        scalars(reactor),
        ended(reactor),
        done(reactor),
        records_left(table.chunks().size()),
        started(table.chunks().size(), false) {
    for (UnitId u = 0; u < table.unit_count(); ++u)
      unit_chunks_left.push_back(table.unit(u).chunk_count);
  }

  std::uint64_t generation;  // the one being made
  StepScalars step;
  Signal scalars;  // step is known
  Signal ended;    // blob is known
  Signal done;     // all chunks updated; on NVMe: the generation is durable
  std::vector<std::byte> blob;
  std::size_t records_left;  // not yet written
  std::vector<std::uint32_t> unit_chunks_left;
  std::vector<bool> started;
  PassPtr previous;  // until it is done
};

OptimizerSweep::OptimizerSweep(Context& context, Parts parts, Settings settings,
                               std::uint64_t generation)
    : context_(context),
      parts_(parts),
      settings_(std::move(settings)),
      durable_generation_(generation),
      written_generation_(context.table.chunks().size(), generation) {
  for (std::size_t i = 0; i < context.table.chunks().size(); ++i) {
    written_.emplace_back(context.reactor);
  }
}

std::uint64_t OptimizerSweep::item_bytes(const Context& context, const ParamHome& params,
                                         const GradHome& grads, const Chunk& chunk) {
  const std::uint64_t record =
      context.placement.optimizer == Tier::kNvme ? chunk.record_bytes() : 0;
  return record + params.item_bytes(chunk) + grads.item_bytes(chunk);
}

std::uint64_t OptimizerSweep::item_bytes(ChunkId id) const {
  return item_bytes(context_, parts_.params, parts_.grads, context_.table.chunk(id));
}

void OptimizerSweep::begin(std::uint64_t generation) {
  if (current_ && current_->generation == generation) return;
  ZIGGURAT_CHECK(!current_ || current_->ended.is_set(), "generation {} begins inside {}",
                 generation, current_->generation);
  auto pass = std::make_shared<Pass>(context_.reactor, generation, context_.table);
  pass->previous = std::exchange(current_, pass);
}

void OptimizerSweep::gradient_started(UnitId unit, std::uint64_t generation,
                                      const StepScalars* early) {
  begin(generation);
  if (early != nullptr && !current_->scalars.is_set()) {
    current_->step = *early;
    current_->scalars.set();
  }
  const UnitChunks& chunks = context_.table.unit(unit);
  if (early != nullptr) {
    for (std::uint32_t i = 0; i < chunks.chunk_count; ++i)
      start_chunk(current_, chunks.first_chunk + i);
    return;
  }
  const std::size_t ahead = std::min(settings_.read_ahead_chunks, context_.table.chunks().size());
  for (ChunkId id = 0; id < ahead; ++id) start_chunk(current_, id);
}

void OptimizerSweep::end_step(const StepScalars& step, std::vector<std::byte> blob) {
  ZIGGURAT_CHECK(current_ != nullptr && !current_->ended.is_set(), "a step without gradients");
  if (!current_->scalars.is_set()) {
    current_->step = step;
    current_->scalars.set();
  }
  current_->blob = std::move(blob);
  current_->ended.set();
  for (ChunkId id = 0; id < context_.table.chunks().size(); ++id) start_chunk(current_, id);
}

void OptimizerSweep::start_chunk(const PassPtr& pass, ChunkId id) {
  if (pass->started[id]) return;
  pass->started[id] = true;
  context_.spawn(update_chunk(pass, id));
}

Task<> OptimizerSweep::update_chunk(PassPtr pass, ChunkId id) {
  while (written_generation_[id] + 1 < pass->generation) {
    if (error_) std::rethrow_exception(error_);
    written_[id].reset();
    co_await written_[id].wait();
  }
  Lease lease = co_await prepare(pass, id);
  parts_.flow.arrived(id).reset();
  std::uint64_t hash = 0;
  co_await update(pass, id, lease, hash);
  if (!parts_.records.resident()) {
    // The generation before must be durable before a byte of this one is written: its slots are
    // what a crash falls back to.
    if (pass->previous) co_await pass->previous->done.wait();
    const auto record = lease.bytes().first(context_.table.chunk(id).record_bytes());
    co_await parts_.store.write(id, pass->generation + settings_.store_offset, record, hash,
                                IoPriority::kWriteBack);
  }
  written_generation_[id] = pass->generation;
  if (!error_) written_[id].set();
  if (--pass->records_left == 0) co_await seal(pass);
}

/// Returns once the chunk may be updated: its record is in the lease, its gradient at home, the
/// step's scalars known. Until then the record is clean, and the pool may take the lease back for
/// somebody with a sooner need: then it is read again.
Task<Lease> OptimizerSweep::prepare(PassPtr pass, ChunkId id) {
  const LeaseRequest request{
      .purpose = Purpose::kOptimizer,
      .size_bytes = item_bytes(id),
      .need = {.generation = pass->generation, .position = kFirstRecordPosition + id},
      .holder = "optimizer chunk"};
  for (;;) {
    Lease lease;
    if (request.size_bytes > 0) lease = co_await context_.pool.acquire(request);
    if (!parts_.records.resident()) {
      const auto record = lease.bytes().first(context_.table.chunk(id).record_bytes());
      co_await parts_.store.read(id, pass->generation + settings_.store_offset - 1, record,
                                 IoPriority::kPrefetch);
    }
    const bool kept = co_await wait_for_gradient(pass, id, lease);
    if (kept) co_return lease;
  }
}

/// False if the pool took `lease` back meanwhile.
Task<bool> OptimizerSweep::wait_for_gradient(PassPtr pass, ChunkId id, Lease& lease) {
  Signal& arrived = parts_.flow.arrived(id);
  bool taken = false;
  PinnedPool::ReclaimId offer = 0;
  if (lease && !(arrived.is_set() && pass->scalars.is_set())) {
    const Need need{.generation = pass->generation, .position = kFirstRecordPosition + id};
    offer = context_.pool.offer(lease, need, [&lease, &taken] {
      taken = true;
      lease.reset();
    });
  }
  std::exception_ptr error;
  try {
    co_await arrived.wait();
    co_await pass->scalars.wait();
  } catch (...) {
    error = std::current_exception();
  }
  if (offer != 0 && !taken) context_.pool.withdraw(offer);
  if (error) std::rethrow_exception(error);
  co_return !taken;
}

/// From record and gradient to new parameters at home; `hash` is the new record's.
Task<> OptimizerSweep::update(PassPtr pass, ChunkId id, Lease& lease, std::uint64_t& hash) {
  const Chunk& chunk = context_.table.chunk(id);
  const bool stored = !parts_.records.resident();
  std::span<std::byte> item = lease.bytes();
  const std::span<std::byte> record =
      stored ? item.first(chunk.record_bytes()) : parts_.records.record(id);
  if (stored) item = item.subspan(chunk.record_bytes());
  const std::span<std::byte> param_item = item.first(parts_.params.item_bytes(chunk));
  const std::span<std::byte> grad_item = item.last(parts_.grads.item_bytes(chunk));
  const std::span<const bf16> grad = co_await parts_.grads.fetch(id, grad_item);
  const std::uint64_t to = pass->generation + settings_.store_offset;

  const std::span<bf16> param = parts_.params.destination(id, param_item);
  StateStore::Expected expected{};
  UpdateHashing hashing{.verify = stored, .seed_before = 0, .seed_after = 0};
  if (stored) {
    expected = parts_.store.expected(id, to - 1);
    hashing.seed_before = expected.seed;
    hashing.seed_after = parts_.store.write_seed(id, to);
  }
  UpdateHashes hashes;
  const std::function<void()> job = [&] {
    const CountedTime busy(context_.metrics, Counter::kOptimizerCpuNs);
    const RecordView view{.record = record, .grad = as_typed(grad), .param = as_typed(param)};
    hashes =
        update_record(pass->step, view, context_.table.decay_runs(id), stored ? &hashing : nullptr);
  };
  co_await context_.workers.run(context_.reactor, "adamw", job);
  context_.metrics.add(Counter::kOptimizerBytes, update_bytes(chunk));
  parts_.grads.drop(id);
  if (stored && hashes.before != expected.hash) throw parts_.store.corrupt_record(id, to - 1);
  hash = hashes.after;

  co_await parts_.params.publish(id, param);
  if (--pass->unit_chunks_left[chunk.unit] == 0)
    parts_.cache.unit_updated(chunk.unit, pass->generation);
}

/// Every record of the pass is written: once step() has given the blob, the generation becomes
/// durable.
Task<> OptimizerSweep::seal(PassPtr pass) {
  co_await pass->ended.wait();
  if (!parts_.records.resident()) {
    const std::uint64_t stored_generation = pass->generation + settings_.store_offset;
    const std::function<void()> before_seal = [&] {
      if (settings_.before_seal) settings_.before_seal(pass->generation);
    };
    co_await parts_.store.commit(stored_generation, pass->blob, before_seal);
    parts_.store.set_durable_everywhere(stored_generation);
    durable_generation_ = pass->generation;
  }
  pass->previous.reset();
  pass->done.set();
}

Task<> OptimizerSweep::settled() {
  if (error_) std::rethrow_exception(error_);
  PassPtr pass = current_;
  if (pass && !pass->ended.is_set())
    pass = pass->previous;  // in mid-step: what was finished before it
  if (pass) co_await pass->done.wait();
}

Task<> OptimizerSweep::checkpoint(std::uint64_t generation, std::span<const std::byte> blob) {
  ZIGGURAT_CHECK(parts_.records.resident(), "records on NVMe are durable by themselves");
  if (generation == durable_generation_) co_return;
  const std::uint64_t stored_generation = parts_.store.durable_generation() + 1;
  const std::size_t count = context_.table.chunks().size();
  for (std::size_t begin = 0; begin < count; begin += kCheckpointBatch) {
    WorkGroup batch(context_.reactor);
    for (std::size_t id = begin; id < std::min(count, begin + kCheckpointBatch); ++id) {
      batch.spawn(checkpoint_chunk(static_cast<ChunkId>(id), stored_generation));
    }
    co_await batch.wait_idle();
  }
  const std::function<void()> before_seal = [&] {
    if (settings_.before_seal) settings_.before_seal(generation);
  };
  co_await parts_.store.commit(stored_generation, blob, before_seal);
  parts_.store.set_durable_everywhere(stored_generation);
  durable_generation_ = generation;
}

Task<> OptimizerSweep::checkpoint_chunk(ChunkId id, std::uint64_t stored_generation) {
  const std::span<const std::byte> record = parts_.records.record(id);
  std::uint64_t hash = 0;
  const std::uint64_t seed = parts_.store.write_seed(id, stored_generation);
  const std::function<void()> job = [&] {
    hash = record_hash(record, seed, context_.table.record_format());
  };
  co_await context_.workers.run(context_.reactor, "hash record", job);
  co_await parts_.store.write(id, stored_generation, record, hash, IoPriority::kWriteBack);
}

void OptimizerSweep::fail(std::exception_ptr error) {
  error_ = error;
  for (Signal& signal : written_) signal.fail(error);
  for (PassPtr pass = current_; pass; pass = pass->previous) {
    pass->scalars.fail(error);
    pass->ended.fail(error);
    pass->done.fail(error);
  }
}

}  // namespace ziggurat
