// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_sweep.h: the optimizer pass of a step: every chunk through
// read, update, write, as leases allow.
//
// One coroutine a chunk, and no more of them at once than there are work items and a few: who waits
// has a stack. Order is forward order, so that the next forward starts on units whose chunks are
// done while later ones still stream. Before the norm is known only as many chunks are
// read ahead as fit beside all gradients. With a guess at the step's scalars, updates follow the
// gradients instead and start during backward. An update that the step has not earned is a guess,
// whatever made it start: its parameters and records are written, the records into the slots of the
// generation being made, and its gradient stays until the ranks have judged the step. If the step
// is judged good with other scalars, every guessed chunk is made again from its old record; if it
// is judged bad, the old parameters are brought home from it. So a guess needs the old record whole
// in a slot that nothing touches before the verdict: records on NVMe, in two slots. Nobody sees a
// guessed parameter: a unit whose gradient is finished is not acquired again in its step, and the
// next step begins after the verdict.
// Reactor's thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/runtime/trace.h"
#include "core/schedule/context.h"
#include "core/schedule/optimizer/device_staging.h"
#include "core/schedule/optimizer/record_watch.h"
#include "core/schedule/optimizer/state_writes.h"
#include "core/schedule/optimizer/work_memory.h"
#include "optimizer/update.h"
#include "tiers/striped_store.h"

namespace ziggurat {

class OptimizerSweep {
 public:
  struct Parts {
    StateHomes homes;
    DeviceStaging& staging;  ///< for chunks that the device updates
    /// Null: records are in memory, and nothing is ever durable.
    StripedStore* store;
    /// A generation is sealed here once the ranks' least says so.
    Quorum& ranks;
    /// All chunks of `unit` that this rank updates stand at `generation` at home.
    std::function<void(UnitId unit, std::uint64_t generation)> unit_updated;
    /// Steps of the unit's parameters in `generation`, where a trainer writes masters.
    std::function<std::uint64_t(UnitId unit, std::uint64_t generation)> param_steps = {};
    /// What is in it goes into the records of the next step, before its update. Not with guesses.
    StateWrites* writes = nullptr;
    /// Null: nobody copies records.
    RecordWatch* watch = nullptr;
  };
  struct Settings {
    std::size_t work_items = 0;  ///< that fit beside all gradients and kept records
    /// Steps from one generation that becomes durable by itself to the next: those that it divides.
    /// 0: none does. The store counts what it sealed, the engine finished steps.
    std::uint64_t seal_every = 1;
    std::function<void(std::uint64_t generation)> before_seal;  ///< generation as the engine counts
  };
  /// The state stands at `generation` (finished steps), stored as the store's newest generation.
  OptimizerSweep(Context& context, Parts parts, Settings settings, std::uint64_t generation);

  /// Bytes at the beginning of `chunk`'s record that an update need not read: the parameter, where
  /// the record holds it and it is in memory anyway.
  static std::uint64_t not_read_bytes(const Context& context, const ParamHome& params,
                                      const Chunk& chunk);

  /// Updates of the next step can be taken back: the record before each is whole in a slot that
  /// nothing touches meanwhile.
  bool can_guess() const;
  /// A gradient of the step that makes `generation` is on its way: records may be read ahead. With
  /// a `guess` at the step's scalars (the same at every call of a step) the unit's chunks are
  /// updated as its gradient arrives. Only if can_guess().
  void gradient_started(UnitId unit, std::uint64_t generation, const StepScalars* guess);
  /// All gradients have arrived and the step is judged good: `step` are its scalars, and `blob`
  /// belongs to the generation being made; none: give_blob() does, and it is sealed then. Starts
  /// what has not started; what was made with a wrong guess is made again. Errors: those of the
  /// cancelled scope; no generation is made then.
  void end_step(const StepScalars& step, std::optional<std::vector<std::byte>> blob);
  /// That of the newest step that has ended.
  void give_blob(std::vector<std::byte> blob);
  /// Instead of end_step(): the step is judged bad, and the generation is not made. Returns when
  /// gradients are dropped and all parameters and records are those of the generation before. The
  /// next gradients make the same generation. Errors: of reading old records back; the parameters
  /// are then of two generations.
  Task<> undo_step();
  /// Between a step's first gradient and its verdict.
  bool step_open() const;

  /// Newest generation whose every record is durable on every rank, as the engine counts. From any
  /// thread.
  std::uint64_t durable_generation() const noexcept { return durable_generation_; }
  /// Waits until every finished step is updated and, where records are on NVMe, durable. A step
  /// that is still open is not waited for.
  Task<> settled();
  /// Waits until the chunk's record is that of `generation`, a finished step: durable or not.
  Task<> record_written(ChunkId id, std::uint64_t generation);
  /// The store's generation that the newest finished step's records go into.
  std::uint64_t storing() const noexcept;
  /// The generation of the store that has the chunk's newest record, if it was written since it was
  /// made.
  std::uint64_t stored_in(ChunkId id) const noexcept { return stored_in_[id]; }
  /// Once settled(): writes the records of `generation` that are in memory alone, and seals it.
  /// Also while a step is open: nothing starts early on such records, so until the verdict they are
  /// those of the generation before. Errors: the drive's; another rank's. Nothing is used up then:
  /// it may be asked for again, where the store can be written to.
  Task<> checkpoint(std::uint64_t generation, std::span<const std::byte> blob);

 private:
  struct Pass;  // optimizer_pass.h
  using PassPtr = std::shared_ptr<Pass>;
  /// What a chunk holds while it is worked on.
  struct Item {
    Lease lease{};                ///< none if the chunk has its own, or needs no memory
    WorkMemory memory{};          ///< parts of that
    bool known = false;           ///< the record needs no verification
    bool param_not_read = false;  ///< the parameter it begins with is at home, as it was
    bool begun = true;            ///< counts in Pass::begun
  };

  // optimizer_sweep.cc
  void begin(std::uint64_t generation);
  void give_place(Pass& pass);
  bool writes(const Pass& pass, ChunkId id) const;
  void start_chunk(const PassPtr& pass, ChunkId id, Lease lease);
  void pass_constants(const PassPtr& pass);
  void start_more(const PassPtr& pass);
  std::optional<ChunkId> next_chunk(Pass& pass) const;
  void read_ahead(const PassPtr& pass);
  Task<> update_chunk(PassPtr pass, ChunkId id, Lease lease);
  Task<> remake_chunk(PassPtr pass, ChunkId id);
  Task<> end_chunk(PassPtr pass, ChunkId id, Item& item, bool made);
  void make_way(Pass& pass, ChunkId id, Item& item);
  void leave(Pass& pass, Item& item);
  Task<bool> make_record(Pass& pass, ChunkId id, Item& item);
  Task<bool> judged_record(Pass& pass, ChunkId id, Item& item, bool guessed);
  bool record_made(Pass& pass, ChunkId id);
  Task<> guess_record(Pass& pass, ChunkId id, Item& item);
  Task<> earned_record(Pass& pass, ChunkId id, Item& item);
  void updated(Pass& pass, ChunkId id);
  void refute(Pass& pass);
  void trace_guess(const Pass& pass);

  // optimizer_chunk.cc
  LeaseRequest request(const Pass& pass, ChunkId id) const;
  Task<> prepare(Pass& pass, ChunkId id, Item& item, bool whole);
  Task<std::uint64_t> read(Pass& pass, ChunkId id, Item& item, bool whole);
  Task<bool> wait_for_gradient(Pass& pass, ChunkId id, Item& item);
  Task<> update(Pass& pass, ChunkId id, Item& item, std::uint64_t& hash);
  Task<> apply_writes(const Pass& pass, ChunkId id, Item& item, const StateWrites::Arrays& writes);
  Task<> publish_master(const Pass& pass, ChunkId id, const Item& item);
  RecordView view_of(ChunkId id, const Item& item) const;
  Task<> make_step(const Pass& pass, ChunkId id, const Item& item, const StepScalars& steps,
                   const RecordView& view, std::uint64_t& hash);
  Task<> update_on_device(const Pass& pass, ChunkId id, const Item& item, const StepScalars& steps,
                          std::uint64_t& hash);
  Task<> require_param_untouched(ChunkId id, std::uint64_t stored, const Item& item) const;
  Task<> restore(Pass& pass, ChunkId id, Item& item);
  Task<> write(Pass& pass, ChunkId id, const Item& item, std::uint64_t hash);
  void release(Item& item);

  // optimizer_seal.cc
  Task<> seal(PassPtr pass);
  Task<> commit(std::uint64_t generation, std::uint64_t stored, std::span<const std::byte> blob);
  Task<> sealed_or_ended(Task<> committing);
  Task<> checkpoint_chunk(ChunkId id, std::uint64_t generation, std::uint64_t stored);

  Context& context_;
  Parts parts_;
  Settings settings_;
  std::size_t chunks_at_once_;  // of a pass
  std::atomic<std::uint64_t> durable_generation_;
  PassPtr current_;                                // of the step under way, or the last one
  std::size_t items_out_ = 0;                      // leases of work items, of all passes
  std::vector<std::uint64_t> written_generation_;  // per chunk: of its newest whole record
  std::vector<Signal> written_;                    // per chunk: that changed
  std::vector<std::uint64_t> stored_in_;           // per chunk: the store's generation of it
  std::uint64_t next_stored_;                      // the store's generation that is made next
  bool fresh_ = true;                              // nothing was written of it
  int guess_track_ = -1;                           // of the trace, once there is something to show
};

}  // namespace ziggurat
