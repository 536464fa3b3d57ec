// SPDX-License-Identifier: Apache-2.0
// core/engine/state/storage.cc: finds the drives of directories. Directories on the same block
// device share a ring.
#include "core/engine/state/storage.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>

#include "aio/drive_queue.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/topology/thread_place.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

/// Makes the directory `path` if it does not exist, and returns its block device.
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
      mapping_(HostMappingOptions{.owner = "store tables",
                                  .size_bytes = round_up(size_bytes, kPageBytes),
                                  .huge_pages = false}) {}

std::unique_ptr<Storage> Storage::open(Runtime& runtime, Communicator& agreements,
                                       const std::vector<StoreDirectory>& store) {
  auto storage = std::make_unique<Storage>(agreements);
  const IoObservers observers{
      .metrics = &runtime.metrics, .trace = runtime.trace.get(), .activity = &storage->activity};
  std::vector<std::uint64_t> devices;
  std::map<std::uint64_t, std::uint64_t> measured;
  for (const StoreDirectory& directory : store) {
    devices.push_back(runtime.drive_number ? runtime.drive_number(directory.path)
                                           : made_directory(directory.path));
    std::uint64_t& most = measured[devices.back()];
    most = std::max(most, directory.outstanding_bytes);
  }
  if (runtime.topology.has_several_nodes()) {
    for (const StoreDirectory& directory : store)
      storage->drive_nodes[directory.path] = runtime.drive_node(directory.path);
  }
  std::map<std::uint64_t, IoEngine*> engines;
  for (std::size_t i = 0; i < store.size(); ++i) {
    IoEngine*& io = engines[devices[i]];
    if (io == nullptr) {
      DriveQueueOptions options;
      if (measured[devices[i]] > 0) options.outstanding_bytes_max = measured[devices[i]];
      const ThreadPlace near_drive(storage->cpus_near(runtime.topology, store[i].path),
                                   fmt::format("transfers of `store={}`", store[i].path));
      storage->drives.push_back(std::make_unique<DriveQueue>(
          runtime.reactor, runtime.io_engine(runtime.reactor, store[i].path), options));
      io = storage->drives.back().get();
    }
    storage->places.push_back(
        {.io = *io, .observers = observers, .directory = store[i].path, .weight = store[i].weight});
  }
  return storage;
}

std::span<const int> Storage::cpus_near(const Topology& topology,
                                        const std::string& directory) const {
  const auto node = drive_nodes.find(directory);
  return node == drive_nodes.end() ? std::span<const int>() : topology.cpus_of(node->second);
}

std::vector<int> Storage::chunk_drive_nodes() const {
  std::vector<int> by_stripe;
  if (drive_nodes.empty()) return by_stripe;
  for (const StripedStore::Share& share : store->shares())
    by_stripe.push_back(drive_nodes.at(share.directory));
  std::vector<int> by_chunk;
  for (std::size_t id = 0; id < store->chunk_count(); ++id)
    by_chunk.push_back(by_stripe[store->stripe_of(static_cast<ChunkId>(id))]);
  return by_chunk;
}

StripedStore::Environment Storage::environment(Runtime& runtime) {
  scratch.emplace(StripedStore::scratch_bytes(places.size()));
  return {.reactor = runtime.reactor,
          .ranks = quorum,
          .places = places,
          .staging =
              [this](std::uint64_t size_bytes) {
                staging.emplace_back(size_bytes);
                return staging.back().bytes();
              },
          .scratch = scratch->bytes()};
}

void Storage::moved(std::span<const std::string> directories) {
  store->moved(directories);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (auto node = drive_nodes.extract(places[i].directory); !node.empty()) {
      node.key() = directories[i];
      drive_nodes.insert(std::move(node));
    }
    places[i].directory = directories[i];
  }
}

std::string Storage::paths() const {
  std::string text;
  for (const StripePlace& place : places) text += (text.empty() ? "" : ",") + place.directory;
  return text;
}

}  // namespace ziggurat
