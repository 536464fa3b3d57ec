// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_save.h: one checkpoint of all ranks, from its directory to the name
// that makes it one.
//
//   FOLDER/step-000000010/rank-00000-of-00002-00000.safetensors ..
//                         manifest.json       appears when every byte of the others is durable
//   FOLDER/step-000000010-1a2b3c4d/           where another line of history has that name already,
//                                             or the filesystem has no locks
//   FOLDER/latest                             the directory's name: for people and other tools, a
//                                             hint that nothing here reads
//
//   FOLDER/.lock                              held by whoever saves in it: one at a time
//
// A directory without a manifest is what a save or a removal left that was cut off: nobody loads
// it, and the next save in the folder removes it. All ranks see one filesystem. Reactor's thread.
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
    WorkerPool& workers;
    IoEngine& io;
    Communicator& ranks;  ///< of all ranks, and of nothing else while a save is under way
    IoObservers observers{};
    BlockingCalls calls{};            ///< names on the target: it may hang
    AwaitedRanks* awaited = nullptr;  ///< whom it waits for, where somebody asks
  };
  struct Request {
    std::string folder;
    Retention retention{};
    StateContent content;  ///< rank 0's counts
    ShardPlan plan;        ///< this rank's
  };

  /// Makes the directory, and every rank its files. All ranks begin, or none. A checkpoint of this
  /// step and line that has a flaw (CheckpointFacts) is replaced. Errors: kInvalidArgument, EEXIST,
  /// where one without a flaw is there already; kUnavailable where another process saves in the
  /// folder; kResourceExhausted naming the path; PeerFailed where it was another rank's error.
  static Task<std::unique_ptr<CheckpointSave>> begin(Environment environment, Request request);

  StateSink& sink() noexcept { return *writer_; }
  const std::string& directory() const noexcept { return directory_; }
  /// Rank 0's: what was to be removed and is still there. No error of the save.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  std::uint64_t size_bytes() const noexcept { return writer_ ? writer_->size_bytes() : 0; }

  /// Every rank calls it once. `failure`: this rank could not give everything to its sink, and no
  /// checkpoint is made. Returns when it is durable under its name. Errors: `failure`; errno's;
  /// PeerFailed. After an error nothing of it stays, as far as files can be removed; or all of it
  /// does, where that is whole and `latest` could not be written. What retention could not remove
  /// is a note.
  Task<> commit(std::exception_ptr failure);

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
  /// Names on the target.
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
  std::unique_ptr<DirectFile> lock_;  // rank 0's; none where the filesystem has no locks
  std::unique_ptr<CheckpointWriter> writer_;
  bool published_ = false;  // rank 0: the manifest has its name, or may have it after a crash
};

}  // namespace ziggurat
