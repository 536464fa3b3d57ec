// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer_sweep.h: the optimizer pass of a step: every chunk through read, update,
// write, as leases allow.
//
// One coroutine a chunk. Order is forward order, so that the next forward starts on units whose
// chunks are done while later ones still stream. Before the norm is known only as many chunks are
// read ahead as fit beside all gradients. With clipping off, updates follow the gradients instead
// and start during backward. Reactor's thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/schedule/context.h"
#include "core/schedule/gradient_flow.h"
#include "core/schedule/homes.h"
#include "core/schedule/param_cache.h"
#include "optimizer/update.h"
#include "tiers/striped_store.h"

namespace ziggurat {

class OptimizerSweep {
 public:
  struct Parts {
    ParamHome& params;
    GradHome& grads;
    RecordHome& records;
    StripedStore& store;
    GradientFlow& flow;
    ParamCache& cache;
  };
  struct Settings {
    std::size_t read_ahead_chunks = 0;  ///< records that fit beside all gradients
    /// The store counts what it sealed, the engine finished steps; with records on NVMe the two run
    /// in step, this far apart (modulo 2^64): store generation = engine generation + store_offset.
    std::uint64_t store_offset = 0;
    std::function<void(std::uint64_t generation)> before_seal;  ///< generation as the engine counts
  };
  /// The state stands at `generation` (finished steps), stored as the store's newest generation.
  OptimizerSweep(Context& context, Parts parts, Settings settings, std::uint64_t generation);

  /// The lease that one work item takes: record, and parameters or gradient where those are on
  /// NVMe.
  static std::uint64_t item_bytes(const Context& context, const ParamHome& params,
                                  const GradHome& grads, const Chunk& chunk);

  /// A gradient of the step that makes `generation` is on its way: records may be read ahead. With
  /// `early` (the step's scalars, known because nothing depends on the norm) the unit's chunks are
  /// updated as its gradient arrives.
  void gradient_started(UnitId unit, std::uint64_t generation, const StepScalars* early);
  /// All gradients have arrived and the norm is known; `blob` belongs to the generation being made.
  /// Starts what has not started.
  void end_step(const StepScalars& step, std::vector<std::byte> blob);

  /// Newest generation whose every record is durable, as the engine counts. From any thread.
  std::uint64_t durable_generation() const noexcept { return durable_generation_; }
  /// Waits until every finished step is updated and, where records are on NVMe, durable.
  Task<> settled();
  /// For records off NVMe: writes them all as the store's next generation and seals it.
  Task<> checkpoint(std::uint64_t generation, std::span<const std::byte> blob);

  void fail(std::exception_ptr error);

 private:
  struct Pass;
  using PassPtr = std::shared_ptr<Pass>;
  void begin(std::uint64_t generation);
  void start_chunk(const PassPtr& pass, ChunkId id);
  Task<> update_chunk(PassPtr pass, ChunkId id);
  Task<Lease> prepare(PassPtr pass, ChunkId id);
  Task<bool> wait_for_gradient(PassPtr pass, ChunkId id, Lease& lease);
  Task<> update(PassPtr pass, ChunkId id, Lease& lease, std::uint64_t& hash);
  Task<> seal(PassPtr pass);
  Task<> checkpoint_chunk(ChunkId id, std::uint64_t stored_generation);
  std::uint64_t item_bytes(ChunkId id) const;

  Context& context_;
  Parts parts_;
  Settings settings_;
  std::atomic<std::uint64_t> durable_generation_;
  PassPtr current_;                                // of the step under way, or the last one
  std::vector<std::uint64_t> written_generation_;  // per chunk: of its newest whole record
  std::vector<Signal> written_;                    // per chunk: that changed
  std::exception_ptr error_;
};

}  // namespace ziggurat
