// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_files.h: a checkpoint that a command reads, with the files and the
// engine that moves their bytes.
#pragma once

#include <memory>
#include <string>

#include "core/checkpoint/checkpoint_reader.h"
#include "core/engine/runtime.h"

namespace ziggurat::cli {

class CheckpointFiles {
 public:
  /// The checkpoint `path`, or the newest in that folder. Errors: CheckpointReader::open()'s.
  CheckpointFiles(Runtime& runtime, const std::string& path);
  ~CheckpointFiles();
  CheckpointFiles(const CheckpointFiles&) = delete;
  CheckpointFiles& operator=(const CheckpointFiles&) = delete;

  CheckpointReader& reader() noexcept { return *reader_; }

 private:
  Runtime& runtime_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<CheckpointReader> reader_;
};

}  // namespace ziggurat::cli
