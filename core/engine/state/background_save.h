// SPDX-License-Identifier: Apache-2.0
// core/engine/state/background_save.h: writes a checkpoint of one generation while the next ones
// are made.
//
// Records are copied beside the sweeps (record_copier.h), and no step waits for the target. Whoever
// waits for the end of a save waits while its target answers (save_target.h). Private to
// core/engine. Reactor's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/state_saver.h"
#include "core/engine/engine.h"
#include "core/engine/save_target.h"
#include "core/engine/state/record_copier.h"
#include "core/engine/state/storage.h"
#include "core/plan/host_plan.h"
#include "core/schedule/context.h"

namespace ziggurat {

class BackgroundSave {
 public:
  /// Returns the host memory for records that wait to be written and for their copies that are
  /// being written.
  static std::uint64_t memory_bytes(const ChunkTable& table) {
    static_assert(2 * RecordCopier::kLanes == kSaveRecords);
    return kSaveRecords * table.largest_record_bytes();
  }

  struct Parts {
    Context& context;
    Runtime& runtime;
    RecordCopier& copier;
    Communicator& ranks;  ///< used by saves only
    EngineConfig::Checkpoint settings;
  };
  explicit BackgroundSave(const Parts& parts);

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
  bool given_up() const noexcept { return run_ && parts_.copier.given_up(); }
  void give_up_with_others();
  /// Returns when the save has ended. If its target hangs, gives the save up and returns.
  Task<> ended();
  /// Whether calls to the save's target may never return. Until they do, they use this object's
  /// memory.
  bool hangs() const noexcept { return run_ && hangs_; }
  /// Returns the saves that have ended since the last call.
  std::vector<SaveOutcome> take_outcomes() { return std::exchange(outcomes_, {}); }

 private:
  struct Run;
  using RunPtr = std::shared_ptr<Run>;

  Task<> save(RunPtr run, Request request);
  Task<> copy_all(Run& run, CheckpointSave& save);
  void report(Run& run, SaveOutcome outcome, const std::exception_ptr& failure);
  Task<> open_folder(std::string folder);

  Parts parts_;
  AlignedMemory memory_;
  // A target that hangs blocks this thread, and no step.
  WorkerPool caller_{{.threads = 1, .cpus = {}}};
  std::map<std::string, std::unique_ptr<IoEngine>> engines_;  // by folder
  RunPtr run_;
  bool hangs_ = false;  // run_'s target
  std::vector<SaveOutcome> outcomes_;
  int save_track_ = 0;  // track of the trace, if there is one
};

}  // namespace ziggurat
