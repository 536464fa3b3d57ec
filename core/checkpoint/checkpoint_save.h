// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_save.h: saves one checkpoint of all ranks, from making its directory
// to publishing its manifest.
//
//   FOLDER/step-000000010/rank-00000-of-00002-00000.safetensors ..
//                         manifest.json       appears when every byte of the shards is durable
//   FOLDER/step-000000010-1a2b3c4d/           where another line of history has that name already,
//                                             or the filesystem has no locks
//   FOLDER/latest                             the directory's name: for people and other tools, a
//                                             hint that ziggurat does not read
//
//   FOLDER/.lock                              held by the one process that saves in the folder
//
// A directory without a manifest is left over from a save or a removal that was cut off. Nobody
// loads it, and the next save in the folder removes it. All ranks see one filesystem. Reactor's
// thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aio/text_file.h"
#include "collectives/communicator.h"
#include "core/checkpoint/checkpoint_folder.h"
#include "core/checkpoint/checkpoint_writer.h"
#include "core/checkpoint/line_history.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/save_ranks.h"

namespace ziggurat {

class CheckpointSave {
 public:
  struct Environment {
    Reactor& reactor;
    Workers& workers;
    IoEngine& io;
    Communicator& ranks;  ///< all ranks; used for nothing else while a save is under way
    IoObservers observers{};
    BlockingCalls calls{};  ///< run calls that name files on the target, which may hang
  };
  struct Request {
    std::string folder;
    Retention retention{};
    StateContent content;  ///< rank 0's counts
    ShardPlan plan;        ///< of this rank
  };

  /// Makes the directory, and on every rank its files. Either all ranks begin or none does. A
  /// checkpoint of this step and line that has a flaw (CheckpointFacts) is replaced. Errors:
  /// kInvalidArgument with EEXIST if one without a flaw exists; kUnavailable if another process
  /// saves in the folder; kResourceExhausted naming the path; PeerFailed for another rank's error.
  static Task<std::unique_ptr<CheckpointSave>> begin(Environment environment, Request request);

  StateSink& sink() noexcept { return *writer_; }
  const std::string& directory() const noexcept { return directory_; }
  /// On rank 0: what should have been removed but is still there. That is no error of the save.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  std::uint64_t size_bytes() const noexcept { return writer_ ? writer_->size_bytes() : 0; }

  /// Ends the save; every rank calls it once. `failure` says why this rank could not give
  /// everything to its sink; no checkpoint is made then. Returns when the checkpoint is durable
  /// under its name. Errors: `failure`; system errors; PeerFailed. After an error nothing of the
  /// checkpoint stays, as far as its files can be removed. But all of it stays if it is whole and
  /// only `latest` could not be written. What retention could not remove becomes a note.
  Task<> commit(std::exception_ptr failure);
  /// Called in place of commit() when every rank knows that the save has failed: rank 0 removes
  /// what is there of it, and nobody else anything, because that may take so long that the step is
  /// being saved again. Nothing is given to the sink any more.
  Task<> remove_all();

 private:
  CheckpointSave(Environment environment, Request request);
  Task<> agree_on_directory();
  Task<> make_directory();
  Task<bool> takes(const CheckpointEntry& name);
  void remove_cut_off();
  void say_notes() const;
  std::optional<LineId> line() const;
  Task<> publish(Manifest manifest, std::span<const std::string> files);
  TextPlace text_place() const noexcept {
    return {environment_.reactor, environment_.io, environment_.observers, environment_.calls};
  }
  /// Runs calls that name files on the target.
  Task<> call(const std::function<void()>& calls) const {
    return environment_.calls.run(environment_.reactor, calls);
  }
  Task<> retain() noexcept;
  Task<> let_go();
  void remove(const std::string& directory);
  bool withdraw() noexcept;
  void clean() noexcept;

  Environment environment_;
  Request request_;
  SaveRanks ranks_;
  std::string directory_;
  std::vector<std::string> notes_;
  std::unique_ptr<DirectFile> lock_;  // on rank 0; null if the filesystem has no locks
  std::unique_ptr<CheckpointWriter> writer_;
  bool published_ = false;  // on rank 0: the manifest has its name, or may have it after a crash
};

}  // namespace ziggurat
