// SPDX-License-Identifier: Apache-2.0
// integrations/cli/store_paths.cc: reads the names of a store's directories, and asks the
// filesystem and the machine profile about them.
#include "integrations/cli/store_paths.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <sstream>
#include <system_error>

#include "base/topology/limits.h"
#include "integrations/cli/settings.h"
#include "tiers/store/state_store.h"
#include "tiers/store/striping.h"

namespace ziggurat::cli {

namespace fs = std::filesystem;

std::vector<StoreDirectory> parse_store(const std::string& text) {
  std::vector<StoreDirectory> store;
  std::istringstream words(text + ",");
  for (std::string path; std::getline(words, path, ',');) {
    const bool again = std::ranges::any_of(
        store, [&](const StoreDirectory& directory) { return directory.path == path; });
    if (path.empty() || again)
      throw UsageError(
          fmt::format("--store {}: {}; give one directory, or several separated by commas, each on "
                      "a drive of its own",
                      text, again ? path + " is named twice" : "a name is empty"));
    store.push_back({.path = path});
  }
  if (store.size() > kStripesMax)
    throw UsageError(fmt::format("--store has {} directories; give at most {} directories",
                                 store.size(), kStripesMax));
  return store;
}

bool apply_profile(std::vector<StoreDirectory>& store, const MachineProfile& profile) {
  std::vector<std::uint64_t> weights;
  for (StoreDirectory& directory : store) {
    const DriveProfile* const drive = profile.under(directory.path);
    if (drive == nullptr) continue;
    directory.outstanding_bytes = drive->outstanding_bytes();
    if (drive->sweep_gb_per_s > 0)
      weights.push_back(
          static_cast<std::uint64_t>(std::max(1.0, drive->sweep_gb_per_s * 1000)));  // MB/s
  }
  if (weights.size() < store.size()) return false;
  for (std::size_t i = 0; i < store.size(); ++i) store[i].weight = weights[i];
  return true;
}

double profiled_bytes_per_s(const std::vector<StoreDirectory>& store,
                            const MachineProfile& profile) {
  double weights = 0;
  for (const StoreDirectory& directory : store) weights += static_cast<double>(directory.weight);
  double slowest = std::numeric_limits<double>::infinity();
  for (const StoreDirectory& directory : store) {
    const DriveProfile* const drive = profile.under(directory.path);
    if (drive == nullptr) return 0;
    const double share = static_cast<double>(directory.weight) / weights;
    slowest = std::min(slowest, 1e9 * std::max(drive->mix_gb_per_s, drive->sweep_gb_per_s) / share);
  }
  return store.empty() ? 0 : slowest;
}

bool store_exists(const std::vector<StoreDirectory>& store) {
  std::error_code ignored;
  for (const StoreDirectory& directory : store) {
    for (std::uint32_t stripe = 0; stripe < kStripesMax; ++stripe) {
      if (fs::exists(fs::path(directory.path) / StateStore::file_name(0, stripe), ignored))
        return true;
    }
  }
  return false;
}

std::uint64_t stored_bytes(const std::vector<StoreDirectory>& store) {
  std::uint64_t total = 0;
  std::error_code error;
  for (const StoreDirectory& directory : store) {
    for (const auto& entry : fs::directory_iterator(directory.path, error)) {
      if (entry.is_regular_file(error)) total += entry.file_size(error);
    }
  }
  return total;
}

std::string free_space(const std::vector<StoreDirectory>& store) {
  std::string text;
  for (const StoreDirectory& directory : store)
    text += fmt::format("{}{}", text.empty() ? "" : " and ",
                        gigabytes(filesystem_of(directory.path).available_bytes));
  return text + " free";
}

std::string gigabytes(std::uint64_t size_bytes) {
  const auto size = static_cast<double>(size_bytes);
  return size < 1e8 ? fmt::format("{:.1f} MB", size / 1e6) : fmt::format("{:.1f} GB", size / 1e9);
}

}  // namespace ziggurat::cli
