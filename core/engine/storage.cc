// SPDX-License-Identifier: Apache-2.0
// core/engine/storage.cc: directories to drives: two on one block device share a ring.
#include "core/engine/storage.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>

#include "aio/drive_queue.h"
#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

/// The block device under `path`, which is made if need be.
dev_t made_directory(const std::string& path) {
  std::error_code failure;
  std::filesystem::create_directories(path, failure);
  struct ::stat about {};
  if (!failure && ::stat(path.c_str(), &about) != 0)
    failure = std::error_code(errno, std::generic_category());
  if (failure)
    throw system_error(failure.value(),
                       fmt::format("`store={}`: cannot create the directory", path));
  return about.st_dev;
}

}  // namespace

AlignedMemory::AlignedMemory(std::uint64_t size_bytes)
    : size_bytes_(size_bytes),
      data_(static_cast<std::byte*>(
          std::aligned_alloc(kPageBytes, round_up(size_bytes, kPageBytes)))) {
  if (!data_) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("no memory for {} of store tables", format_bytes(size_bytes)));
  }
}

std::unique_ptr<Storage> Storage::open(Runtime& runtime, Communicator& agreements,
                                       const std::vector<StoreDirectory>& store) {
  auto storage = std::make_unique<Storage>(agreements);
  const IoObservers observers{
      .metrics = &runtime.metrics, .trace = runtime.trace.get(), .activity = &storage->activity};
  std::vector<dev_t> devices;
  std::map<dev_t, std::uint64_t> measured;
  for (const StoreDirectory& directory : store) {
    devices.push_back(made_directory(directory.path));
    std::uint64_t& most = measured[devices.back()];
    most = std::max(most, directory.outstanding_bytes);
  }
  std::map<dev_t, IoEngine*> engines;
  for (std::size_t i = 0; i < store.size(); ++i) {
    IoEngine*& io = engines[devices[i]];
    if (io == nullptr) {
      DriveQueueOptions options;
      if (measured[devices[i]] > 0) options.outstanding_bytes_max = measured[devices[i]];
      storage->drives.push_back(std::make_unique<DriveQueue>(
          runtime.reactor, runtime.io_engine(runtime.reactor, store[i].path), options));
      io = storage->drives.back().get();
    }
    storage->places.push_back(
        {.io = *io, .observers = observers, .directory = store[i].path, .weight = store[i].weight});
  }
  return storage;
}

StripedStore::Environment Storage::environment(Runtime& runtime, const EngineConfig& config) {
  fill.emplace(StripedStore::fill_bytes(places.size()));
  return {.reactor = runtime.reactor,
          .ranks = quorum,
          .places = places,
          .staging =
              [this](std::uint64_t size_bytes) {
                staging.emplace_back(size_bytes);
                return staging.back().bytes();
              },
          .fill = fill->bytes(),
          .progress =
              [progress = config.progress](std::uint64_t done, std::uint64_t total) {
                if (progress) progress("filling the store", done, total);
              }};
}

std::string Storage::paths() const {
  std::string text;
  for (const StripePlace& place : places) text += (text.empty() ? "" : ",") + place.directory;
  return text;
}

}  // namespace ziggurat
