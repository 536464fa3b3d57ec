// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_files.cc: opened and closed on the reactor.
#include "integrations/cli/checkpoint_files.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/error.h"
#include "core/checkpoint/checkpoint_save.h"

namespace ziggurat::cli {

CheckpointFiles::CheckpointFiles(Runtime& runtime, const std::string& path) : runtime_(runtime) {
  if (!std::filesystem::is_directory(path)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no such directory, so no checkpoint", path), ENOENT);
  }
  runtime.reactor.block_on([](CheckpointFiles& self, const std::string& from) -> Task<> {
    std::exception_ptr error;
    try {
      self.io_ = self.runtime_.io_engine(self.runtime_.reactor, from);
      Task<std::unique_ptr<CheckpointReader>> opening =
          CheckpointReader::open({self.runtime_.reactor, *self.runtime_.workers, *self.io_},
                                 find_checkpoint(*self.io_, from));
      self.reader_ = co_await std::move(opening);
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) co_return;
    self.io_.reset();
    std::rethrow_exception(error);
  }(*this, path));
}

CheckpointFiles::~CheckpointFiles() {
  runtime_.reactor.block_on([](CheckpointFiles& self) -> Task<> {
    self.reader_.reset();
    self.io_.reset();
    co_return;
  }(*this));
}

}  // namespace ziggurat::cli
