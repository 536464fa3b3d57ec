// SPDX-License-Identifier: Apache-2.0
// integrations/cli/checkpoint_files.cc: opens and closes the state that a command reads, on the
// reactor's thread.
#include "integrations/cli/checkpoint_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <utility>

#include "aio/aligned_bytes.h"
#include "base/error.h"
#include "collectives/self_communicator.h"
#include "core/checkpoint/checkpoint_save.h"
#include "integrations/cli/store_paths.h"

namespace ziggurat::cli {

CheckpointFiles::CheckpointFiles(Runtime& runtime, const std::string& path) : runtime_(runtime) {
  std::vector<std::string> directories;
  // Only a store's directories are a list: a folder of checkpoints may have a comma in its name.
  const bool is_one = std::filesystem::exists(path);
  for (const StoreDirectory& directory :
       is_one ? std::vector<StoreDirectory>{{.path = path}} : parse_store(path)) {
    directories.push_back(directory.path);
    if (std::filesystem::exists(directory.path)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not exist, so it holds neither a checkpoint nor a store",
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
  if (StoreReader::is_there(places)) {
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
  Task<std::string> finding =
      find_checkpoint({.reactor = runtime_.reactor, .io = io}, directories.front());
  std::string found = co_await std::move(finding);
  Task<std::unique_ptr<CheckpointReader>> opening =
      CheckpointReader::open({runtime_.reactor, *runtime_.workers, io}, std::move(found));
  reader_ = co_await std::move(opening);
}

/// Opens weights that transformers saved. Where a model was saved with its head, names begin with
/// "transformer.", as in "transformer.wte.weight"; our names do not, so the prefix is removed.
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

void read_state(Runtime& runtime, const std::string& path,
                const std::function<void(CheckpointFiles&)>& use) {
  constexpr int kLooks = 8;
  constexpr auto kQuick = std::chrono::seconds(20);  // within this time, looks are not limited
  const auto begin = std::chrono::steady_clock::now();
  for (int look = 1;; ++look) {
    CheckpointFiles files(runtime, path);
    try {
      return use(files);
    } catch (const Error& error) {
      const bool overtaken = error.code() == ErrorCode::kUnavailable && files.store() != nullptr;
      const bool again = look < kLooks || std::chrono::steady_clock::now() - begin < kQuick;
      if (!overtaken || !again) throw;
    }
  }
}

Task<> for_each_slice(StateSource& from, std::size_t tensor, const Slice& take) {
  constexpr std::uint64_t kAtOnce = 1 << 20;
  const StateTensor& of = from.content().tensors[tensor];
  AlignedPool memory;
  for (std::uint64_t first = 0; first < of.count(); first += kAtOnce) {
    const TensorRun run{.first = first, .count = std::min(kAtOnce, of.count() - first), .at = 0};
    const AlignedBytes bytes = memory.take(run.count * size_bytes(of.type));
    co_await from.read(tensor, std::span(&run, 1), bytes.span());
    Task<> taking = take(run, bytes.span());
    co_await std::move(taking);
  }
}

Task<WrittenCheckpoint> write_checkpoint(Runtime& runtime, const std::string& folder,
                                         StateContent content, ShardPlan plan, const Give& give) {
  const auto io = runtime.io_engine(runtime.reactor, folder);
  SelfCommunicator alone;
  Task<std::unique_ptr<CheckpointSave>> beginning = CheckpointSave::begin(
      {.reactor = runtime.reactor, .workers = *runtime.workers, .io = *io, .ranks = alone},
      {.folder = folder, .content = std::move(content), .plan = std::move(plan)});
  const std::unique_ptr<CheckpointSave> checkpoint = co_await std::move(beginning);
  std::exception_ptr failure;
  try {
    Task<> giving = give(checkpoint->sink());
    co_await std::move(giving);
  } catch (...) {
    failure = std::current_exception();
  }
  co_await checkpoint->commit(failure);
  co_return WrittenCheckpoint{.directory = checkpoint->directory(),
                              .size_bytes = checkpoint->size_bytes(),
                              .notes = checkpoint->notes()};
}

StateSource& CheckpointFiles::source() noexcept {
  if (stored_) return *stored_;
  if (weights_) return *weights_;
  return *reader_;
}

}  // namespace ziggurat::cli
