// SPDX-License-Identifier: Apache-2.0
// tiers/store/state_store_create.cc: makes a new store under its temporary name: it reserves the
// space, and writes what every start reads.
//
// Records are not written yet: those of generation 0 follow, and those of the next go to the other
// slots. To fill the file beforehand would cost as many bytes as three steps write.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"
#include "tiers/store/state_store_impl.h"
#include "tiers/store/store_files.h"
#include "tiers/store/store_survey.h"

namespace ziggurat {
namespace {

class Builder {
 public:
  Builder(StateStore::Impl& store, const StoreSpec& spec) : store_(store), spec_(spec) {}

  Task<> build(StoreLayout& layout, Superblock& identity) {
    const std::string text = store_text(spec_);
    layout = StoreLayout::of(spec_, text.size());
    open_files();
    if (store_.replaced) co_await find_rest_of_replaced();
    DirectFile& file = *store_.file;
    if (kRegionBytes % file.alignment().offset_bytes != 0 ||
        kRegionBytes % file.alignment().memory_bytes != 0)
      throw Error(
          ErrorCode::kUnimplemented,
          fmt::format(
              "direct I/O on {} needs an alignment of {} bytes, but at most {} is supported",
              file.path(), file.alignment().offset_bytes, kRegionBytes));
    file.allocate(layout.file_bytes);
    for (const unsigned parity : {0u, 1u}) {
      for (int copy = 0; copy < kSuperblockCopies; ++copy)
        co_await write_padded(StoreLayout::superblock_offset(parity, copy, layout.file_bytes), {},
                              kRegionBytes);
    }
    for (const std::uint64_t offset : layout.text_offset)
      co_await write_padded(offset, text, layout.text_region_bytes);
    co_await file.sync();
    // fdatasync makes the file's bytes durable, but not its name, on which the other ranks rely
    // (see publish()).
    store_.environment.io.sync_directory(store_.directory);

    identity.rank = static_cast<std::uint32_t>(store_.environment.ranks.rank());
    identity.world_size = static_cast<std::uint32_t>(store_.environment.ranks.world_size());
    identity.mesh.data = identity.world_size;
    identity.stripe_index = store_.environment.stripe_index;
    identity.stripe_count = store_.environment.stripe_count;
    identity.slots = spec_.slots;
    identity.file_bytes = layout.file_bytes;
    identity.chunk_count = spec_.record_bytes.size();
    identity.layout_hash = hash64(std::as_bytes(std::span(spec_.layout)), 0);
    identity.identity_hash = hash64(std::as_bytes(std::span(spec_.run_identity)), 0);
    identity.numerics_hash = hash64(std::as_bytes(std::span(spec_.numerics_fingerprint)), 0);
    identity.text_offset_bytes = layout.text_offset[0];
    identity.text_bytes = text.size();
    identity.text_hash = hash64(std::as_bytes(std::span(text)), 0);
  }

 private:
  /// Opens the files: locks an older store, which this one will replace; removes an unfinished file
  /// that a killed run left; makes the new file.
  void open_files() {
    auto& environment = store_.environment;
    const auto open = [&](const std::string& path, const OpenOptions& options) {
      return DirectFile::open(environment.reactor, environment.io, path, options,
                              environment.observers);
    };
    OpenOptions existing;
    existing.lock = true;
    existing.writable = true;
    if (environment.io.exists(store_.final_path()))
      store_.replaced = open(store_.final_path(), existing);
    if (environment.io.exists(store_.temporary_path())) {
      const auto stale =
          open(store_.temporary_path(), existing);  // its lock shows that nobody is building it
      environment.io.remove(store_.temporary_path());
    }
    OpenOptions fresh = existing;
    fresh.create = true;
    fresh.lock_wait = std::chrono::milliseconds(0);
    store_.file = open(store_.temporary_path(), fresh);
    store_.temporary = true;
  }

  /// Finds the files of the older store that no rank of this one replaces. What another store has
  /// in this directory is none of them.
  Task<> find_rest_of_replaced() {
    const auto& environment = store_.environment;
    std::vector<std::string> beyond;
    for (const std::string& name : environment.io.names_in(store_.directory)) {
      const auto its = store_file_name(name);
      if (its && !its->is_unfinished && its->rank >= environment.ranks.world_size())
        beyond.push_back(store_.directory + "/" + name);
    }
    if (beyond.empty()) co_return;
    const auto older = co_await uuid_of(store_.final_path());
    for (const std::string& path : beyond) {
      const auto uuid = co_await uuid_of(path);
      if (uuid && uuid == older) store_.replaced_rest.push_back(path);
    }
  }

  /// Returns the uuid in a file's superblocks; nothing if none of them is whole.
  Task<std::optional<StoreUuid>> uuid_of(std::string path) {
    const auto survey = StoreSurvey::open_to_look(store_.environment, path);
    try {
      co_await survey->read_superblocks();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDataLoss && error.code() != ErrorCode::kInvalidArgument)
        throw;
      co_return std::nullopt;
    }
    co_return survey->uuid();
  }

  /// Writes `text`, then zeros up to `size_bytes`.
  Task<> write_padded(std::uint64_t offset, std::string_view text, std::uint64_t size_bytes) {
    while (size_bytes > 0) {
      const auto piece = store_.environment.scratch.first(
          std::min<std::uint64_t>(store_.environment.scratch.size(), size_bytes));
      const std::size_t part = std::min(text.size(), piece.size());
      copy_bytes(std::as_bytes(std::span(text.substr(0, part))), piece);
      std::ranges::fill(piece.subspan(part), std::byte{0});
      co_await store_.file->write(offset, piece);
      text.remove_prefix(part);
      offset += piece.size();
      size_bytes -= piece.size();
    }
  }

  StateStore::Impl& store_;
  const StoreSpec& spec_;
};

}  // namespace

std::uint64_t random_u64() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

Task<std::unique_ptr<StateStore>> StateStore::create(StoreEnvironment environment,
                                                     std::string directory, StoreSpec spec) {
  ZIGGURAT_CHECK(!environment.scratch.empty() && environment.scratch.size() % kMiB == 0,
                 "scratch memory of {} bytes", environment.scratch.size());
  Quorum& ranks = environment.ranks;
  auto impl = std::make_unique<Impl>(std::move(environment), std::move(directory));
  std::unique_ptr<StateStore> store(
      new StateStore(std::move(impl)));  // from here on the store's destructor cleans up
  Impl& made = *store->impl_;

  StoreLayout layout;
  Superblock identity;
  Builder builder(made, spec);
  Task<> building = builder.build(layout, identity);
  Task<> built = together(ranks, std::move(building), "create its store");
  co_await std::move(built);

  identity.uuid.high = co_await ranks.max(random_u64());
  identity.uuid.low = co_await ranks.max(random_u64());
  made.newest = identity;
  made.state.epoch = 1;
  made.state.uuid = identity.uuid;
  made.attempt = co_await ranks.max(random_u64());
  made.adopt(std::move(spec), std::move(layout));
  co_return store;
}

}  // namespace ziggurat
