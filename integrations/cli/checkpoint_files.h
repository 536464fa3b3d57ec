// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_files.h: the state that a command reads from a checkpoint, a store or
// a weights file, with the engines that read its files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/safetensors_source.h"
#include "core/checkpoint/shard_plan.h"
#include "core/checkpoint/stored_state.h"
#include "core/engine/runtime.h"

namespace ziggurat::cli {

class CheckpointFiles {
 public:
  /// Opens the checkpoint `path`, the newest checkpoint in the folder `path`, the store in that
  /// folder, or the weights that transformers saved there. The directories of a store are separated
  /// by commas. Errors: those of opening what was found.
  CheckpointFiles(Runtime& runtime, const std::string& path);
  ~CheckpointFiles();
  CheckpointFiles(const CheckpointFiles&) = delete;
  CheckpointFiles& operator=(const CheckpointFiles&) = delete;

  StateSource& source() noexcept;
  /// Exactly one of the next three is not null. It tells what was opened.
  CheckpointReader* checkpoint() noexcept { return reader_.get(); }
  StoredState* store() noexcept { return stored_.get(); }
  SafetensorsSource* weights() noexcept { return weights_.get(); }

 private:
  Task<> open(std::vector<std::string> directories);
  Task<> open_weights(std::string path);

  Runtime& runtime_;
  std::vector<std::unique_ptr<IoEngine>> engines_;
  std::unique_ptr<CheckpointReader> reader_;
  std::unique_ptr<StoredState> stored_;
  std::unique_ptr<SafetensorsSource> weights_;
};

/// Opens the state at `path` (see CheckpointFiles) and calls `use` with it. `use` throws
/// kUnavailable if a run that is still training has overwritten the step that `use` reads; the
/// store is then opened again at its newest step, a few times at most.
void read_state(Runtime& runtime, const std::string& path,
                const std::function<void(CheckpointFiles&)>& use);

/// Takes one slice of a tensor. `bytes` stay valid until the task that it returns is done.
using Slice = std::function<Task<>(const TensorRun& run, std::span<const std::byte> bytes)>;
Task<> for_each_slice(StateSource& from, std::size_t tensor, const Slice& take);

struct WrittenCheckpoint {
  std::string directory;
  std::uint64_t size_bytes = 0;
  std::vector<std::string> notes = {};  ///< what was removed or left behind, in words
};
/// Writes the whole state to `sink`.
using Give = std::function<Task<>(StateSink& sink)>;
/// Makes a checkpoint in `folder`. `give` must write everything in `plan` to the sink. Errors:
/// those of CheckpointSave, and those of `give`.
Task<WrittenCheckpoint> write_checkpoint(Runtime& runtime, const std::string& folder,
                                         StateContent content, ShardPlan plan, const Give& give);

}  // namespace ziggurat::cli
