// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_succession.cc: the order of renames and removals, and what each leaves behind.
#include "tiers/store/store_succession.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <sstream>
#include <utility>

#include "aio/text_file.h"
#include "base/error.h"
#include "tiers/store/state_store.h"
#include "tiers/store/store_files.h"

namespace ziggurat {
namespace {

constexpr std::string_view kFirstLine = "ziggurat store succession 1";
constexpr std::uint64_t kNoteBytesMax = std::uint64_t{16} << 20;

std::string note_in(const std::string& directory) {
  return fmt::format("{}/{}", StoreSuccession::folder_in(directory), StoreSuccession::kNote);
}

/// Errors: kDataLoss.
std::vector<std::string> parse_note(const std::string& text, const std::string& path) {
  std::istringstream lines(text);
  std::string line;
  std::vector<std::string> names;
  bool good = std::getline(lines, line) && line == kFirstLine;
  while (good && std::getline(lines, line)) {
    good = is_store_file(line);
    names.push_back(line);
  }
  if (good && !names.empty()) return names;
  throw Error(
      ErrorCode::kDataLoss,
      fmt::format("{} is not the note of a resharded store, so neither store is touched; see which "
                  "files are whole (`ziggurat ckpt verify`), then remove the folder {} or move its "
                  "files up",
                  path, StoreSuccession::kFolder));
}

}  // namespace

std::string StoreSuccession::folder_in(const std::string& directory) {
  return fmt::format("{}/{}", directory, kFolder);
}

std::string StoreSuccession::place_of(const StripePlace& place, const std::string& name) {
  std::string built = fmt::format("{}/{}", folder_in(place.directory), name);
  return place.io.exists(built) ? built : fmt::format("{}/{}", place.directory, name);
}

std::vector<std::string> StoreSuccession::names_in(const StripePlace& place,
                                                   const std::string& directory) const {
  try {
    return place.io.names_in(directory);
  } catch (const Error& error) {
    if (error.native() == ENOENT) return {};
    throw;
  }
}

bool StoreSuccession::left_behind() const {
  return std::ranges::any_of(places_, [this](const StripePlace& place) {
    const std::string folder = folder_in(place.directory);
    // A simulated disk knows only files, so it has the folder while the folder has a file.
    return place.io.exists(folder) || !names_in(place, folder).empty();
  });
}

Task<std::optional<StoreSuccession::Names>> StoreSuccession::decided() const {
  std::optional<Names> names;
  for (const StripePlace& place : places_) {
    const std::string path = note_in(place.directory);
    if (!place.io.exists(path)) continue;
    const std::string text = co_await read_text({reactor_, place.io}, path, kNoteBytesMax);
    Names its = parse_note(text, path);
    if (names && *names != its) {
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("{}: the notes in these directories belong to different stores; "
                              "give the directories of one store",
                              path));
    }
    names = std::move(its);
  }
  co_return names;
}

Task<> StoreSuccession::recover() {
  notes_ = co_await finish_creation(reactor_, places_);
  if (!left_behind()) co_return;
  std::optional<Names> names = co_await decided();
  if (names) {
    co_await move(std::move(*names));
    co_return;
  }
  // A rank of the run that was to divide the store may still live, and build.
  std::vector<std::unique_ptr<DirectFile>> built = locked(/*built=*/true);
  lock_old();
  remove_built();
  built.clear();  // a network's filesystem keeps removed files in their folder while they are open
  remove_folders();
  old_.clear();
}

std::vector<std::size_t> StoreSuccession::order() const {
  std::vector<std::size_t> order;
  for (std::uint32_t stripe = 0; order.size() < places_.size(); ++stripe) {
    const auto has = [&](const StripePlace& place) {
      return place.io.exists(place.directory + "/" + StateStore::file_name(0, stripe));
    };
    const auto found = std::ranges::find_if(places_, has);
    if (found == places_.end()) break;
    order.push_back(static_cast<std::size_t>(found - places_.begin()));
  }
  for (std::size_t place = 0; place < places_.size(); ++place) {
    if (std::ranges::find(order, place) == order.end()) order.push_back(place);
  }
  return order;
}

void StoreSuccession::lock_old() { old_ = locked(/*built=*/false); }

/// Locks the old store's files, or all that were built to take their place, finished or not.
/// Errors: kUnavailable if another process has one.
std::vector<std::unique_ptr<DirectFile>> StoreSuccession::locked(bool built) const {
  std::vector<std::unique_ptr<DirectFile>> files;  // all, or none
  for (const StripePlace& place : places_) {
    const std::string in = built ? folder_in(place.directory) : place.directory;
    for (const std::string& name : names_in(place, in)) {
      if (built ? name == kNote : !is_store_file(name)) continue;
      files.push_back(DirectFile::open(reactor_, place.io, in + "/" + name,
                                       {.writable = true, .lock = true}, place.observers));
    }
  }
  return files;
}

/// Returns the names of the new store's files, in all folders together.
StoreSuccession::Names StoreSuccession::new_names() const {
  std::set<std::string> names;
  for (const StripePlace& place : places_) {
    for (const std::string& name : names_in(place, folder_in(place.directory))) {
      if (!is_store_file(name)) continue;
      bool alone = names.insert(name).second;
      for (const StripePlace& other : places_) {
        if (&other != &place) alone = alone && !other.io.exists(other.directory + "/" + name);
      }
      if (alone) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the file {}/{} cannot be used, because another directory of the "
                              "store has a file of that name",
                              folder_in(place.directory), name));
    }
  }
  if (names.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("no store was built in {}", folder_in(places_.front().directory)));
  }
  return {names.begin(), names.end()};
}

Task<> StoreSuccession::complete() {
  Names names = new_names();
  const std::string text = fmt::format("{}\n{}\n", kFirstLine, fmt::join(names, "\n"));
  for (const StripePlace& place : places_) {
    const std::string folder = folder_in(place.directory);
    place.io.make_directory(folder);
    place.io.sync_directory(folder);  // the new files' names must be durable before anything relies
                                      // on them
    place.io.sync_directory(place.directory);
  }
  for (const StripePlace& place : places_) {
    co_await write_text({reactor_, place.io}, note_in(place.directory), text);
    place.io.sync_directory(folder_in(place.directory));
  }
  co_await move(std::move(names));
  old_.clear();
}

/// Checks that each file exists, in its folder or, if it was renamed already, in its directory.
void StoreSuccession::require_all(const Names& names) const {
  for (const std::string& name : names) {
    const bool there = std::ranges::any_of(places_, [&](const StripePlace& place) {
      return place.io.exists(place.directory + "/" + name) ||
             place.io.exists(folder_in(place.directory) + "/" + name);
    });
    if (there) continue;
    throw Error(ErrorCode::kDataLoss,
                fmt::format("a resharded store was to replace the one in {}, but its file {} is "
                            "missing; give all directories of the store",
                            places_.front().directory, name));
  }
}

Task<> StoreSuccession::move(Names names) {
  require_all(names);
  for (const StripePlace& place : places_) {
    const std::string folder = folder_in(place.directory);
    for (const std::string& name : names) {
      if (place.io.exists(folder + "/" + name))
        place.io.rename(folder + "/" + name, place.directory + "/" + name);
    }
    place.io.sync_directory(place.directory);
  }
  for (const StripePlace& place : places_) {
    for (const std::string& name : names_in(place, place.directory)) {
      if (is_store_file(name) && !std::ranges::binary_search(names, name))
        place.io.remove(place.directory + "/" + name);
    }
    place.io.sync_directory(place.directory);
  }
  remove_built();
  remove_folders();
  co_return;
}

/// Removes what the folders have, with the notes.
void StoreSuccession::remove_built() const {
  for (const StripePlace& place : places_) {
    const std::string folder = folder_in(place.directory);
    std::vector<std::string> names = names_in(place, folder);
    // The built files are removed before the note that says that they are whole.
    std::ranges::stable_partition(names, [](const std::string& name) { return name != kNote; });
    for (const std::string& name : names) place.io.remove(folder + "/" + name);
  }
}

void StoreSuccession::remove_folders() const {
  for (const StripePlace& place : places_) {
    const std::string folder = folder_in(place.directory);
    if (place.io.exists(folder)) place.io.remove_directory(folder);
    place.io.sync_directory(place.directory);
  }
}

}  // namespace ziggurat
