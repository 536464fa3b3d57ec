// SPDX-License-Identifier: Apache-2.0
// core/engine/storage.cc: directories to drives: two on one block device share a ring.
#include "core/engine/storage.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <map>

#include "aio/drive_queue.h"
#include "aio/probe.h"
#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

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

std::unique_ptr<Storage> Storage::open(Runtime& runtime, const std::vector<StoreDirectory>& store) {
  auto storage = std::make_unique<Storage>();
  const IoObservers observers{
      .metrics = &runtime.metrics, .trace = runtime.trace.get(), .activity = &storage->activity};
  std::map<dev_t, IoEngine*> engines;
  for (const StoreDirectory& directory : store) {
    std::error_code failure;
    std::filesystem::create_directories(directory.path, failure);
    struct ::stat about {};
    if (!failure && ::stat(directory.path.c_str(), &about) != 0)
      failure = std::error_code(errno, std::generic_category());
    if (failure)
      throw system_error(failure.value(),
                         fmt::format("--store {}: cannot create the directory", directory.path));
    IoEngine*& io = engines[about.st_dev];
    if (io == nullptr) {
      storage->drives.push_back(std::make_unique<DriveQueue>(
          runtime.reactor, choose_io_engine(runtime.reactor, directory.path)));
      io = storage->drives.back().get();
    }
    storage->places.push_back({.io = *io,
                               .observers = observers,
                               .directory = directory.path,
                               .weight = directory.weight});
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
