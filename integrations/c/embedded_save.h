// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_save.h: writes a checkpoint of an embedder's engines, while it waits or
// while it makes the next steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint_save.h"
#include "core/engine/save_target.h"
#include "core/engine/state_copy.h"
#include "integrations/c/embedded_checkpoint.h"
#include "integrations/c/saved_tensors.h"

namespace ziggurat {

/// A save that was begun.
class EmbeddedSaving {
 public:
  enum class Beside : std::uint8_t {
    kNothing,  ///< the embedder waits: its values stay as they are until end()
    kSteps,    ///< the embedder goes on: its values are copied first
  };
  /// Begins a save of the engines' newest step. Every rank of `runtime` does, or one rank alone;
  /// what is wrong on one rank is an error of end() on all. `runtime` outlives this object; engines
  /// may be closed, which ends the save.
  EmbeddedSaving(Runtime& runtime, EmbeddedSave save, Beside beside);
  /// Waits for the end of the save. Must not be called if it hangs().
  ~EmbeddedSaving();
  EmbeddedSaving(const EmbeddedSaving&) = delete;
  EmbeddedSaving& operator=(const EmbeddedSaving&) = delete;

  std::uint64_t step() const noexcept { return save_.content.step; }
  /// Whether the checkpoint is still being written.
  bool under_way() const noexcept { return under_way_.load(); }
  /// Returns the checkpoint's directory when it is durable under its name. Gives the save up if its
  /// target hangs. Any thread, but the trainer's if a rank saves for others. Errors: those of
  /// CheckpointSave, and of copying the state: then there is no checkpoint.
  std::string end();
  /// Whether calls to the target may never return; they use this object's memory.
  bool hangs() const noexcept { return hangs_ && under_way(); }

 private:
  Task<> start();
  CopyOptions copy_options(const EmbeddedEngine& engine) const;
  StateContent content() const;
  ShardPlan plan() const;
  void pin_state();
  void require_one_kind() const;
  Task<> save();
  Task<> begin();
  Task<> copy();
  Task<> copy_engine(std::size_t engine);
  Task<> end_checkpoint();
  std::uint64_t lead_bytes(const EmbeddedSave::Part& part, std::size_t array,
                           std::uint64_t first) const;
  Task<> write(const EmbeddedSave::Part& part, std::size_t array, std::uint64_t first,
               std::shared_ptr<const AlignedBytes> values);
  Task<> write_now(const EmbeddedSave::Part& part, std::size_t array, std::uint64_t first,
                   std::shared_ptr<const AlignedBytes> values, std::shared_ptr<Signal> written);
  Task<> ended_or_given_up();
  void copy_others();
  void copy_other(const EmbeddedSave::Other& its);
  Task<> copy_array(const EmbeddedSave::Part& part, std::size_t array,
                    std::span<const std::byte> values);
  Task<> others_copied(std::exception_ptr failure);
  bool waits_for_time() const;

  Runtime& runtime_;
  EmbeddedSave save_;
  Beside beside_;
  /// True if codes of 8 bits are saved as the values that they stand for, because their scales are
  /// for blocks of what an engine has, not of whole parameters. The same on all ranks.
  bool widens_;
  StateKind kind_;
  SavedTensors tensors_;
  std::vector<std::vector<std::byte>> values_;      // copies of save_.values
  std::vector<std::shared_ptr<StateCopy>> copies_;  // one for each engine
  CheckpointSave::Request request_;
  std::exception_ptr refused_;  // why this rank cannot begin
  /// Makes calls that name files, which may take minutes. If the reactor stood still meanwhile, the
  /// other ranks would think that this rank is gone.
  WorkerPool caller_{{.threads = 1, .cpus = {}}};
  SaveTarget target_;
  std::unique_ptr<Communicator> ranks_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<CheckpointSave> checkpoint_;
  std::optional<Signal> begun_;   // set when checkpoint_ can be written to, or never will be
  std::optional<Signal> others_;  // set when what other ranks have is copied
  WorkGroup writes_;              // those that the target has not answered
  std::set<std::shared_ptr<Signal>> waiting_;  // for their ends
  std::exception_ptr given_up_;                // why end() has given the save up
  bool committing_ = false;
  std::atomic<bool> writable_ = false;  // checkpoint_ takes what other ranks have
  std::atomic<bool> failed_ = false;    // it need not be copied any more
  bool others_asked_ = false;
  std::string directory_;
  std::exception_ptr failure_;
  std::vector<std::string> notes_;
  std::atomic<bool> under_way_ = true;
  std::mutex ending_;
  bool said_ = false;
  std::atomic<bool> hangs_ = false;
};

}  // namespace ziggurat
