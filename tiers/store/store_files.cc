// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_files.cc: finds a creation of which one rank has its file's name already.
#include "tiers/store/store_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "tiers/pool/host_mapping.h"
#include "tiers/store/quorum.h"
#include "tiers/store/store_survey.h"

namespace ziggurat {
namespace {

/// Takes `expected` from the front of `text`, if it is there.
bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

template <class Number>
bool take_number(std::string_view& text, Number& number) {
  const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (wrong != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

/// One process that looks at the files of all ranks.
class CutCreation {
 public:
  CutCreation(Reactor& reactor, std::span<const StripePlace> places)
      : reactor_(reactor), places_(places) {}

  Task<std::vector<std::string>> finish() {
    find_files();
    if (unfinished_.empty()) co_return std::move(notes_);
    scratch_ = std::make_unique<HostMapping>(HostMappingOptions{
        .owner = "store under construction", .size_bytes = kMiB, .huge_pages = false});
    std::vector<StoreUuid> named;
    for (const File& file : finished_) {
      const auto its = co_await looked(file);
      if (its) named.push_back(its->uuid());
    }
    for (const File& file : unfinished_) {
      const auto its = co_await looked(file);
      if (!its || !its->is_sealed_creation()) continue;
      if (std::ranges::find(named, its->uuid()) == named.end()) continue;
      co_await take_name(file, its->uuid());
    }
    co_return std::move(notes_);
  }

 private:
  struct File {
    const StripePlace* place;
    StoreFileName name;
    std::string path() const {
      return place->directory + "/" +
             (name.is_unfinished ? StateStore::temporary_name(name.rank, name.stripe)
                                 : StateStore::file_name(name.rank, name.stripe));
    }
    std::string final_path() const {
      return place->directory + "/" + StateStore::file_name(name.rank, name.stripe);
    }
  };

  void find_files() {
    for (const StripePlace& place : places_) {
      for (const std::string& name : place.io.names_in(place.directory)) {
        const auto its = store_file_name(name);
        if (its) (its->is_unfinished ? unfinished_ : finished_).push_back({&place, *its});
      }
    }
  }

  StoreEnvironment environment(const File& file) {
    return {.reactor = reactor_,
            .io = file.place->io,
            .ranks = alone_,
            .observers = file.place->observers,
            .staging = {},
            .scratch = scratch_->bytes().first(kMiB),
            .stripe_index = file.name.stripe};
  }

  /// Returns what a file's superblocks say; null if it has none that is whole, or is gone.
  Task<std::unique_ptr<StoreSurvey>> looked(const File& file) {
    try {
      auto survey = StoreSurvey::open_to_look(environment(file), file.path());
      co_await survey->read_superblocks();
      co_return std::move(survey);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDataLoss && error.code() != ErrorCode::kInvalidArgument &&
          error.native() != ENOENT)
        throw;
    }
    co_return nullptr;
  }

  /// Gives a sealed file its name. Its lock, and that of the file which it replaces, show that
  /// nobody else does.
  Task<> take_name(const File& file, StoreUuid uuid) {
    const std::string final_path = file.final_path();
    const OpenOptions locked{.writable = true, .lock = true};
    std::unique_ptr<DirectFile> replaced;
    if (file.place->io.exists(final_path)) {
      replaced =
          DirectFile::open(reactor_, file.place->io, final_path, locked, file.place->observers);
    }
    const auto survey = StoreSurvey::open(environment(file), file.path());
    co_await survey->read_superblocks();  // durable from here on
    if (!survey->is_sealed_creation() || survey->uuid() != uuid) co_return;
    file.place->io.rename(file.path(), final_path);
    file.place->io.sync_directory(file.place->directory);
    notes_.push_back(fmt::format(
        "{}: the creation of this store was cut off between two ranks' renames, and was finished "
        "now",
        final_path));
  }

  Reactor& reactor_;
  std::span<const StripePlace> places_;
  SoloQuorum alone_;
  std::unique_ptr<HostMapping> scratch_;
  std::vector<File> finished_;
  std::vector<File> unfinished_;
  std::vector<std::string> notes_;
};

}  // namespace

std::optional<StoreFileName> store_file_name(const std::string& name) {
  std::string_view rest = name;
  StoreFileName its;
  if (!take(rest, "rank") || !take_number(rest, its.rank) || its.rank < 0) return std::nullopt;
  if (take(rest, "-stripe") && !take_number(rest, its.stripe)) return std::nullopt;
  its.is_unfinished = rest != ".ziggurat";
  const std::string spelled = its.is_unfinished ? StateStore::temporary_name(its.rank, its.stripe)
                                                : StateStore::file_name(its.rank, its.stripe);
  if (name != spelled) return std::nullopt;
  return its;
}

bool is_store_file(const std::string& name) {
  const auto its = store_file_name(name);
  return its && !its->is_unfinished;
}

Task<std::vector<std::string>> finish_creation(Reactor& reactor,
                                               std::span<const StripePlace> places) {
  CutCreation creation(reactor, places);
  co_return co_await creation.finish();
}

}  // namespace ziggurat
