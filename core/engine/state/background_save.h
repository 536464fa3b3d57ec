// SPDX-License-Identifier: Apache-2.0
// core/engine/state/background_save.h: writes a checkpoint of one generation while the next ones
// are made.
//
// Each record is copied to one of two buffers from wherever this costs least: from the sweep that
// makes it; from memory, if the record stays there and is still that generation's; else from its
// slot in the store, which the whole next sweep does not touch. The record is written from the
// buffer to the target, and no step waits for that write.
//
// A sweep that would overwrite a record which was not copied yet waits in RecordWatch's calls, and
// that record is copied next. All waits for a save together last at most stall_max; then the save
// is given up. Even then a sweep waits for a record that is just being read. Copying waits for
// records to be made, but never for a lease, a seal or another rank.
//
// Whoever waits for the end of a save waits as long as its target answers. A target that has not
// answered for stall_max (and at least kSilence; kLongSilence while the save begins or ends) is
// considered to hang, and calls to it may never return. Private to core/engine. Reactor's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/state_saver.h"
#include "core/engine/engine.h"
#include "core/engine/state/storage.h"
#include "core/plan/host_plan.h"
#include "core/schedule/context.h"
#include "core/schedule/optimizer/optimizer_sweep.h"
#include "core/schedule/optimizer/record_home.h"
#include "core/schedule/optimizer/record_watch.h"

namespace ziggurat {

class BackgroundSave final : public RecordWatch {
 public:
  static constexpr std::size_t kLanes = 2;
  /// The time allowed between two answers of a target when something waits for the save's end.
  static constexpr Nanoseconds kSilence = std::chrono::seconds(10);
  /// The time allowed for one sync, one removal, or other ranks, at the beginning and end of a
  /// save. It is shorter than the time after which ranks that stand still end the job
  /// (RankOptions::call_timeout).
  static constexpr Nanoseconds kLongSilence = std::chrono::minutes(8);
  /// Returns the host memory for records that wait to be written and for their copies that are
  /// being written.
  static std::uint64_t memory_bytes(const ChunkTable& table) {
    static_assert(2 * kLanes == kSaveRecords);
    return kSaveRecords * table.largest_record_bytes();
  }

  struct Parts {
    Context& context;
    Runtime& runtime;
    const RecordHome& records;
    StripedStore* store;  ///< may be null
    Communicator& ranks;  ///< used by saves only
    EngineConfig::Checkpoint settings;
  };
  explicit BackgroundSave(const Parts& parts);
  ~BackgroundSave() override;
  void set_sweep(OptimizerSweep& sweep) noexcept { sweep_ = &sweep; }

  struct Request {
    std::uint64_t generation = 0;  ///< the newest finished step
    std::uint64_t stored = 0;      ///< the store's number of it, if records are in the store
    SavingRank rank{};
    CheckpointSave::Request checkpoint{};
  };
  /// Begins a save. Every rank calls it, in the same order, when no save is under way. The save
  /// goes on as a task of the context; if it fails, only the save ends.
  void begin(Request request);
  bool under_way() const noexcept { return run_ != nullptr; }
  /// Returns true if this rank or another has given up the save under way, so that no sweep waits
  /// for it.
  bool given_up() const noexcept;
  void give_up_with_others();
  /// Returns when the save has ended. If its target hangs, gives the save up and returns.
  Task<> ended();
  /// Whether calls to the save's target may never return. Until they do, they use this object's
  /// memory.
  bool hangs() const noexcept { return run_ && hangs_; }
  /// Returns the saves that have ended since the last call.
  std::vector<SaveOutcome> take_outcomes() { return std::exchange(outcomes_, {}); }

  Task<> made(ChunkId chunk, std::uint64_t generation, std::span<const std::byte> record) override;
  Task<> before_change(ChunkId chunk, std::uint64_t generation) override;
  Task<> before_write(ChunkId chunk, std::uint64_t generation, std::uint64_t stored) override;

 private:
  enum class Copy : std::uint8_t {
    kPending,
    kTaken,  ///< being copied to a buffer
    kDone,   ///< copied or no longer needed: sweeps may overwrite its memory and slot
  };
  /// A buffer, with the task that fills and empties it.
  struct Lane {
    enum class State : std::uint8_t {
      kBusy,     ///< copies or writes a record, or has ended
      kIdle,     ///< may be offered a record
      kFilling,  ///< its buffer is being filled by a sweep
      kFull,     ///< its buffer holds the record of `chunk`
    };
    std::span<std::byte> buffer{};
    State state = State::kBusy;
    ChunkId chunk = 0;
    /// Set when checkpoint_bandwidth allows the next write, or when the save is over.
    std::shared_ptr<Signal> due{};
  };
  struct Run;
  using RunPtr = std::shared_ptr<Run>;

  Task<> save(RunPtr run, Request request);
  Task<> copy_all(RunPtr run, CheckpointSave& save);
  Task<> lane(RunPtr run, StateSaver& saver, std::size_t index);
  Task<> copy(Run& run, StateSaver& saver, ChunkId chunk, Lane& lane);
  Task<> fill(Run& run, ChunkId chunk, std::span<std::byte> buffer);
  Task<> bring(Run& run, ChunkId chunk, std::span<std::byte> buffer);
  std::optional<ChunkId> next(Run& run);
  static void take(Run& run, ChunkId chunk, Lane& lane, Lane::State state);
  Task<> watch_sweep(RunPtr run);
  Task<> hold(ChunkId chunk);
  Error stalled_too_long() const;
  Error not_answered(double seconds) const;
  Task<> ended_or(Nanoseconds longest);
  std::uint64_t answers(const Run& run) const;
  void report(Run& run, SaveOutcome outcome, const std::exception_ptr& failure);
  Task<> pace(Run& run, Lane& lane, std::uint64_t size_bytes);
  static void copied(Run& run, ChunkId chunk);
  static void give_up(Run& run, std::exception_ptr why);
  Task<> open_folder(std::string folder);

  Parts parts_;
  OptimizerSweep* sweep_ = nullptr;
  AlignedMemory memory_;
  // A target that hangs blocks this thread, and no step.
  WorkerPool caller_{{.threads = 1, .cpus = {}}};
  std::map<std::string, std::unique_ptr<IoEngine>> engines_;  // by folder
  RunPtr run_;
  bool hangs_ = false;             // run_'s target
  std::shared_ptr<Signal> ended_;  // set for the caller that waits for run_'s end
  Metrics moved_;                  // bytes moved to and from targets
  std::vector<SaveOutcome> outcomes_;
  int save_track_ = 0;  // track of the trace, if there is one
  int wait_track_ = 0;
};

}  // namespace ziggurat
