// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_files.cc: opened and closed on the reactor.
#include "integrations/cli/checkpoint_files.h"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "core/checkpoint/checkpoint_save.h"
#include "integrations/cli/store_paths.h"

namespace ziggurat::cli {

CheckpointFiles::CheckpointFiles(Runtime& runtime, const std::string& path) : runtime_(runtime) {
  std::vector<std::string> directories;
  for (const StoreDirectory& directory : parse_store(path)) {
    directories.push_back(directory.path);
    if (std::filesystem::exists(directory.path)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no such directory, so no checkpoint and no store",
                            directory.path),
                ENOENT);
  }
  runtime.reactor.block_on([](CheckpointFiles& self, std::vector<std::string> from) -> Task<> {
    std::exception_ptr error;
    try {
      co_await self.open(std::move(from));
    } catch (...) {
      error = std::current_exception();
    }
    if (!error) co_return;
    self.engines_.clear();
    std::rethrow_exception(error);
  }(*this, std::move(directories)));
}

Task<> CheckpointFiles::open(std::vector<std::string> directories) {
  if (std::filesystem::is_regular_file(directories.front())) {
    co_await open_weights(directories.front());
    co_return;
  }
  std::vector<StripePlace> places;
  for (const std::string& directory : directories) {
    engines_.push_back(runtime_.io_engine(runtime_.reactor, directory));
    places.push_back({.io = *engines_.back(), .observers = {}, .directory = directory});
  }
  if (StoreReader::ranks_in(places) > 0) {
    Task<std::unique_ptr<StoredState>> opening =
        StoredState::open(runtime_.reactor, *runtime_.workers, std::move(places));
    stored_ = co_await std::move(opening);
    co_return;
  }
  IoEngine& io = *engines_.front();
  if (SafetensorsSource::is_there(io, directories.front())) {
    co_await open_weights(directories.front());
    co_return;
  }
  Task<std::unique_ptr<CheckpointReader>> opening = CheckpointReader::open(
      {runtime_.reactor, *runtime_.workers, io}, find_checkpoint(io, directories.front()));
  reader_ = co_await std::move(opening);
}

/// transformers calls them "transformer.wte.weight" where they are under the model's head, as ours
/// are not.
Task<> CheckpointFiles::open_weights(std::string path) {
  const auto parent = std::filesystem::path(path).parent_path();
  engines_.push_back(runtime_.io_engine(runtime_.reactor, parent.empty() ? "." : parent.string()));
  Task<std::unique_ptr<SafetensorsSource>> opening = SafetensorsSource::open(
      {.reactor = runtime_.reactor, .io = *engines_.back()}, std::move(path), "transformer.");
  weights_ = co_await std::move(opening);
}

CheckpointFiles::~CheckpointFiles() {
  runtime_.reactor.block_on([](CheckpointFiles& self) -> Task<> {
    self.stored_.reset();
    self.reader_.reset();
    self.weights_.reset();
    self.engines_.clear();
    co_return;
  }(*this));
}

StateSource& CheckpointFiles::source() noexcept {
  if (stored_) return *stored_;
  if (weights_) return *weights_;
  return *reader_;
}

}  // namespace ziggurat::cli
