// SPDX-License-Identifier: Apache-2.0
// integrations/cli/lost_store.cc: makes and removes hard links to a lost store's files.
#include "integrations/cli/lost_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/error.h"
#include "tiers/store/store_files.h"

namespace ziggurat::cli {
namespace {

namespace fs = std::filesystem;

/// Calls `body` for each store file of the directory, with the file's name and its name in
/// lost-`number`.
void for_each_file(const StoreDirectory& directory, std::uint64_t number,
                   const std::function<void(const fs::path& file, const fs::path& kept)>& body) {
  const fs::path folder = fs::path(directory.path) / lost_folder(number);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory.path)) {
    if (is_store_file(entry.path().filename().string())) files.push_back(entry.path());
  }
  for (const fs::path& file : files) body(file, folder / file.filename());
}

bool is_kept(const fs::path& file, const fs::path& kept) {
  std::error_code ignored;
  return fs::equivalent(file, kept, ignored);
}

/// Whether something is kept there. A run that was killed before it kept anything leaves an empty
/// folder; one that cannot be read is somebody's.
bool is_used(const fs::path& folder) {
  std::error_code unread;
  const bool empty = fs::is_directory(folder, unread) && fs::is_empty(folder, unread);
  return fs::exists(folder) && (unread || !empty);
}

void sync_directory(const fs::path& path) {
  const int directory = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int failure = directory < 0 || ::fsync(directory) != 0 ? errno : 0;
  if (directory >= 0) ::close(directory);
  if (failure != 0) throw system_error(failure, fmt::format("cannot sync {}", path.string()));
}

}  // namespace

std::string lost_folder(std::uint64_t number) { return fmt::format("lost-{}", number); }

std::uint64_t lost_number(const std::vector<StoreDirectory>& store, std::uint64_t first) {
  for (std::uint64_t number = first;; ++number) {
    bool used = false;
    bool kept = false;
    for (const StoreDirectory& directory : store) {
      used = used || is_used(fs::path(directory.path) / lost_folder(number));
      for_each_file(directory, number, [&](const fs::path& file, const fs::path& name) {
        kept = kept || is_kept(file, name);
      });
    }
    if (kept || !used) return number;
  }
}

/// Takes the highest number that any rank needs, until that number is free on all ranks.
std::uint64_t agreed_lost_number(
    const std::vector<StoreDirectory>& store,
    const std::function<std::vector<std::uint64_t>(std::uint64_t)>& share) {
  std::uint64_t number = 1;
  for (;;) {
    const std::vector<std::uint64_t> all = share(lost_number(store, number));
    number = std::ranges::max(all);
    if (std::ranges::min(all) == number) return number;
  }
}

void keep_lost(const std::vector<StoreDirectory>& store, std::uint64_t number) {
  for (const StoreDirectory& directory : store) {
    const fs::path folder = fs::path(directory.path) / lost_folder(number);
    std::error_code failure;
    fs::create_directory(folder, failure);
    if (failure)
      throw system_error(failure.value(), fmt::format("cannot make {}", folder.string()));
    for_each_file(directory, number, [&](const fs::path& file, const fs::path& kept) {
      std::error_code refused;
      fs::create_hard_link(file, kept, refused);
      if (!refused || is_kept(file, kept)) return;  // or another rank kept it first
      throw system_error(refused.value(),
                         fmt::format("the store is lost but was not changed; move its files "
                                     "elsewhere and start again, because {} cannot be kept as {}",
                                     file.string(), kept.string()));
    });
    sync_directory(folder);
    sync_directory(directory.path);
  }
}

void leave_lost(const std::vector<StoreDirectory>& store, std::uint64_t number) {
  for (const StoreDirectory& directory : store) {
    for_each_file(directory, number, [&](const fs::path& file, const fs::path& kept) {
      if (is_kept(file, kept)) fs::remove(file);
    });
  }
}

}  // namespace ziggurat::cli
