// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_save.h: one checkpoint of all ranks, from its directory to the name
// that makes it one.
//
//   FOLDER/step-000000010/rank-00000-of-00002-00000.safetensors ..
//                         manifest.json       appears when every byte of the others is durable
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
#include <string>
#include <vector>

#include "aio/text_file.h"
#include "collectives/communicator.h"
#include "core/checkpoint/checkpoint_writer.h"
#include "core/checkpoint/manifest.h"

namespace ziggurat {

/// "step-000000010".
std::string checkpoint_name(std::uint64_t step);
/// The steps whose checkpoints in `folder` are whole, ascending: those with a manifest, which is
/// not read. None where there is no folder.
std::vector<std::uint64_t> checkpoint_steps(IoEngine& io, const std::string& folder);
/// `path`, or if that is a folder of checkpoints, the newest whole one in it. Errors:
/// kInvalidArgument where there is none.
std::string find_checkpoint(IoEngine& io, const std::string& path);

/// Which checkpoints stay when a new one is whole.
struct Retention {
  std::uint64_t keep_last = 0;   ///< the newest ones; 0: all
  std::uint64_t keep_every = 0;  ///< and those of every so many steps
  bool keep_best = false;        ///< and the best step's, by the newest one's "best_metric"
};
/// The steps that `retention` lets go. The newest never is. `best`: best_step() of the newest.
std::vector<std::uint64_t> expired(const std::vector<std::uint64_t>& steps, Retention retention,
                                   std::optional<std::uint64_t> best);
/// Removes a checkpoint, or what is left of one: its manifest first, so that no half one is ever
/// taken for whole.
void remove_checkpoint(IoEngine& io, const std::string& directory);

class CheckpointSave {
 public:
  struct Environment {
    Reactor& reactor;
    WorkerPool& workers;
    IoEngine& io;
    Communicator& ranks;  ///< of all ranks, and of nothing else while a save is under way
    IoObservers observers{};
    BlockingCalls calls{};  ///< names on the target: it may hang
  };
  struct Request {
    std::string folder;
    Retention retention{};
    StateContent content;  ///< rank 0's counts
    ShardPlan plan;        ///< this rank's
  };

  /// Makes the directory, and every rank its files. All ranks begin, or none. Errors:
  /// kInvalidArgument where this step's checkpoint is there already; kUnavailable where another
  /// process saves in the folder; kResourceExhausted naming the path; PeerFailed where it was
  /// another rank's error.
  static Task<std::unique_ptr<CheckpointSave>> begin(Environment environment, Request request);

  StateSink& sink() noexcept { return *writer_; }
  const std::string& directory() const noexcept { return directory_; }
  std::uint64_t size_bytes() const noexcept { return writer_ ? writer_->size_bytes() : 0; }

  /// Every rank calls it once. `failure`: this rank could not give everything to its sink, and no
  /// checkpoint is made. Returns when it is durable under its name. Errors: `failure`; errno's;
  /// PeerFailed. After an error nothing of it stays, as far as files can be removed; or all of it
  /// does, where that is whole and something after it failed (`latest`, what retention lets go).
  Task<> commit(std::exception_ptr failure);

 private:
  CheckpointSave(Environment environment, Request request);
  Task<> agree(std::exception_ptr error);
  void make_directory();
  void lock_folder();
  void remove_cut_off();
  Task<> gather(Manifest& manifest);
  Task<> publish(const Manifest& manifest);
  TextPlace text_place() const noexcept {
    return {environment_.reactor, environment_.io, environment_.observers, environment_.calls};
  }
  /// Names on the target.
  Task<> call(const std::function<void()>& calls) const {
    return environment_.calls.run(environment_.reactor, calls);
  }
  void let_go();
  bool withdraw() noexcept;
  void clean() noexcept;

  Environment environment_;
  Request request_;
  std::string directory_;
  std::unique_ptr<DirectFile> lock_;  // rank 0's; none where the filesystem has no locks
  std::unique_ptr<CheckpointWriter> writer_;
  bool published_ = false;  // rank 0: the manifest has its name, or may have it after a crash
};

}  // namespace ziggurat
