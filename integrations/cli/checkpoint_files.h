// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_files.h: the state that a command reads, a checkpoint's or a store's,
// with the files and the engines that move their bytes.
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
  /// The checkpoint `path`, or the newest in that folder, or the store there, or the weights that
  /// transformers saved there; a store of several directories has commas between. Errors: those of
  /// opening it.
  CheckpointFiles(Runtime& runtime, const std::string& path);
  ~CheckpointFiles();
  CheckpointFiles(const CheckpointFiles&) = delete;
  CheckpointFiles& operator=(const CheckpointFiles&) = delete;

  StateSource& source() noexcept;
  /// One of them is not null.
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

/// Gives `use` the state at `path` (see CheckpointFiles). Where that is the store of a run that
/// goes on, and has overtaken `use`, which threw kUnavailable: again with its newest step, a few
/// times.
void read_state(Runtime& runtime, const std::string& path,
                const std::function<void(CheckpointFiles&)>& use);

/// A tensor's bytes, a slice at a time: `take` has what is read until it is done.
using Slice = std::function<Task<>(const TensorRun& run, std::span<const std::byte> bytes)>;
Task<> for_each_slice(StateSource& from, std::size_t tensor, const Slice& take);

struct WrittenCheckpoint {
  std::string directory;
  std::uint64_t size_bytes = 0;
};
/// Makes a checkpoint in `folder` of what `give` gives to its sink, all of `plan`. Errors:
/// CheckpointSave's, and give's.
using Give = std::function<Task<>(StateSink& sink)>;
Task<WrittenCheckpoint> write_checkpoint(Runtime& runtime, const std::string& folder,
                                         StateContent content, ShardPlan plan, const Give& give);

}  // namespace ziggurat::cli
