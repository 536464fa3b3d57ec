// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/optimizer_sweep.h: the optimizer's pass over all chunks in a step. Each
// chunk is read, updated and written, as leases allow.
//
// Each chunk has a coroutine. Only a few more of them exist at once than there are work items,
// because each takes memory for its stack. Chunks are updated in forward order, so that the next
// forward can start on units whose chunks are done while later chunks are still being updated.
// Before the norm is known, only as many chunks are read ahead as fit beside all gradients.
//
// With a guess at the step's scalars, updates follow the gradients and start during backward. Any
// update before the ranks have judged the step is a guess. Its parameters and its record are
// written, the record into a slot of the generation being made, and its gradient is kept until the
// verdict. If the step is judged good with other scalars, every guessed chunk is made again from
// its old record. If the step is judged bad, the old parameters are made again from the old record.
// So a guess needs the old record undamaged in a slot that nothing writes before the verdict:
// records must be on NVMe, in two slots. Nobody sees a guessed parameter, because a unit whose
// gradient is finished is not acquired again in its step, and the next step begins after the
// verdict.
//
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
#include "tiers/store/striped_store.h"

namespace ziggurat {

class OptimizerSweep {
 public:
  struct Parts {
    StateHomes homes;
    DeviceStaging& staging;  ///< for chunks that the device updates
    /// Null if records are in memory only; then nothing is ever durable.
    StripedStore* store;
    /// Agrees with the other ranks: a generation counts as durable once all ranks have sealed it.
    Quorum& ranks;
    /// Called when all chunks of `unit` that this rank updates are at home at `generation`.
    std::function<void(UnitId unit, std::uint64_t generation)> unit_updated;
    /// Returns how many steps parameters have made in `generation`. Used if a trainer writes
    /// masters.
    std::function<ParamSteps(std::uint64_t generation)> param_steps = {};
    /// State that a trainer has written. It is put into the records by the next step, before their
    /// update. Must not be used with guesses.
    StateWrites* writes = nullptr;
    /// Null if nobody copies records.
    RecordWatch* watch = nullptr;
  };
  struct Settings {
    std::size_t work_items = 0;  ///< work items that fit beside all gradients and kept records
    /// Every generation that is a multiple of this number, as the engine counts them (finished
    /// steps), becomes durable by itself; 0 if none does. The store counts only those that it
    /// sealed.
    std::uint64_t seal_every = 1;
    std::function<void(std::uint64_t generation)> before_seal;  ///< called with the engine's count
    /// Whether the store has no generation yet.
    bool unsealed = false;
    /// Whether no record exists either. The first sweep makes them from the parameters, and seals
    /// the store's first generation.
    bool unmade = false;
    float initial_accumulator = 0;  ///< with which records are made
  };
  /// Begins with the state at `generation` (finished steps), which is the store's newest
  /// generation, if it has any.
  OptimizerSweep(Context& context, Parts parts, Settings settings, std::uint64_t generation);

  /// Returns how many bytes at the beginning of `chunk`'s record an update need not read. They are
  /// the parameter, if the record holds it and it is `in_memory` anyway.
  static std::uint64_t not_read_bytes(const ChunkTable& table, const Chunk& chunk, bool in_memory);

  /// Whether updates of the next step can be taken back: then the old record of each is undamaged
  /// in a slot that nothing writes before the verdict.
  bool can_guess() const;
  /// Notes that a gradient of the step that makes `generation` is on its way, so records may be
  /// read ahead. With a `guess` at the step's scalars (the same in all calls of a step), the unit's
  /// chunks are updated as soon as its gradient arrives. A guess is allowed only if can_guess().
  void gradient_started(UnitId unit, std::uint64_t generation, const StepScalars* guess);
  /// Ends a step that is judged good; all gradients have arrived. `step` has its scalars. `blob` is
  /// stored with the generation being made; if there is none, the generation is sealed only after
  /// give_blob(). Starts all remaining updates, and makes those again that used a wrong guess.
  /// Errors: those of the cancelled scope; then no generation is made.
  void end_step(const StepScalars& step, std::optional<std::vector<std::byte>> blob);
  /// Gives the blob of the newest step that has ended.
  void give_blob(std::vector<std::byte> blob);
  /// Ends a step that is judged bad, instead of end_step(). Its generation is not made. Returns
  /// when gradients are dropped and all parameters and records are those of the previous
  /// generation. The next gradients make the same generation. Errors: those of reading old records
  /// back; then the parameters are a mixture of two generations.
  Task<> undo_step();
  /// Whether a step has begun (with its first gradient) and has not been judged yet.
  bool step_open() const;
  /// Whether a step that was judged good has yet to be made durable by its sweep, on all ranks.
  bool step_sealing() const;

  /// Returns the newest generation, in the engine's count, of which every record is durable on
  /// every rank. Any thread.
  std::uint64_t durable_generation() const noexcept { return durable_generation_; }
  /// Waits until every finished step is updated and, if records are on NVMe, durable. Does not wait
  /// for a step that is still open.
  Task<> settled();
  /// Waits until the chunk's record is the record of `generation`, which must be a finished step.
  /// The record need not be durable.
  Task<> record_written(ChunkId id, std::uint64_t generation);
  /// Returns the store's generation into which the records of the newest finished step are written.
  std::uint64_t storing() const noexcept;
  /// Returns the store's generation that has the chunk's newest record, if that record was written
  /// after it was made.
  std::uint64_t stored_in(ChunkId id) const noexcept { return stored_in_[id]; }
  /// Whether the chunk's record does not exist yet.
  bool is_unmade(ChunkId id) const noexcept { return stored_in_[id] == kUnmade; }
  /// Makes the record with which a chunk begins from its parameters, in `memory`.
  Task<> make_from_params(ChunkId id, const WorkMemory& memory);
  /// Makes and writes all records that do not exist yet, into the generation that is sealed next.
  /// No step may be under way.
  Task<> make_all();
  /// Writes those records of `generation` that are only in memory, and seals the generation. Must
  /// be called after settled(). A step may be open: no update of a record in memory starts before
  /// the verdict, so these records are still those of the previous generation. Errors: the drive's;
  /// another rank's. After an error the call may be made again when the store can be written to.
  Task<> checkpoint(std::uint64_t generation, std::span<const std::byte> blob);

 private:
  struct Pass;  // optimizer_pass.h
  using PassPtr = std::shared_ptr<Pass>;
  /// The memory and the state of a chunk while it is worked on.
  struct Item {
    Lease lease{};        ///< empty if the chunk has memory of its own, or needs none
    WorkMemory memory{};  ///< parts of that memory
    bool known = false;   ///< the record needs no verification
    /// The parameter at the beginning of the record was not read, because it is unchanged at home.
    bool param_not_read = false;
    bool unmade = false;  ///< there was no record to read
    bool begun = true;    ///< counted in Pass::begun
  };
  /// What a step does to a chunk.
  struct Effect {
    bool stepped = true;            ///< some parameter has a gradient
    bool written = false;           ///< the trainer has written some parameter since the last step
    std::vector<DecayRun> runs{};   ///< of a packed unit; otherwise the table's are used
    std::vector<ParamRun> made{};   ///< of a packed unit: the parameters that are stepped
    std::vector<ParamRun> taken{};  ///< of a packed unit: those that were written
  };

  // optimizer_sweep.cc
  void begin(std::uint64_t generation);
  void give_place(Pass& pass);
  bool writes(const Pass& pass, ChunkId id) const;
  bool watched() const noexcept { return parts_.watch != nullptr && parts_.watch->watching(); }
  void start_chunk(const PassPtr& pass, ChunkId id, Lease lease);
  void pass_constants(const PassPtr& pass);
  void start_more(const PassPtr& pass);
  bool carry(const PassPtr& pass, ChunkId id);
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
  Effect effect_of(ChunkId id, const StepScalars& steps) const;
  Task<> publish_masters(const Pass& pass, ChunkId id, const Item& item);
  RecordView view_of(ChunkId id, const Item& item) const;
  Task<> make_step(const Pass& pass, ChunkId id, const Item& item, const StepScalars& steps,
                   const RecordView& view, const Effect& effect, std::uint64_t& hash);
  Task<> update_on_device(const Pass& pass, ChunkId id, const Item& item, const StepScalars& steps,
                          std::uint64_t& hash);
  Task<> step_on_device(ChunkId id, const Item& item, const StepScalars& steps);
  Task<> require_param_untouched(ChunkId id, std::uint64_t stored, const Item& item) const;
  Task<> restore(Pass& pass, ChunkId id, Item& item);
  Task<> write(Pass& pass, ChunkId id, const Item& item, std::uint64_t hash);
  void release(Item& item);

  // optimizer_seal.cc
  Task<> seal(PassPtr pass);
  Task<> commit(std::uint64_t generation, std::uint64_t stored, std::span<const std::byte> blob);
  Task<> sealed_or_ended(Task<> committing);
  Task<> checkpoint_chunk(ChunkId id, std::uint64_t generation, std::uint64_t stored);
  Task<> write_unmade(ChunkId id, std::uint64_t stored);

  /// Stands for no generation of the store.
  static constexpr std::uint64_t kUnmade = ~std::uint64_t{0};

  Context& context_;
  Parts parts_;
  Settings settings_;
  std::vector<ChunkId> order_;  // all chunks, as forward needs them
  std::vector<ChunkId> place_;  // per chunk: its place there
  std::size_t chunks_at_once_;  // the most coroutines of a pass
  std::atomic<std::uint64_t> durable_generation_;
  PassPtr current_;            // pass of the step under way, or of the last step
  std::size_t items_out_ = 0;  // leases of work items, in all passes
  // Per chunk: generation of its newest complete record.
  std::vector<std::uint64_t> written_generation_;
  std::vector<Signal> written_;           // per chunk: set when written_generation_ changes
  std::vector<std::uint64_t> stored_in_;  // per chunk: the store's generation of that record
  std::uint64_t next_stored_;             // the store's generation that is made next
  bool fresh_ = true;                     // nothing of that generation was written
  int guess_track_ = -1;                  // track of the trace; -1 until it is needed
};

}  // namespace ziggurat
