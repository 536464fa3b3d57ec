// SPDX-License-Identifier: Apache-2.0
// integrations/cli/store_paths.h: reads --store, which names one directory, or several that share a
// store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/engine/engine_config.h"
#include "core/plan/machine_profile.h"

namespace ziggurat::cli {

/// Reads "DIR" or "DIR,DIR2,...". Errors: UsageError for an empty or repeated name, or for too
/// many.
std::vector<StoreDirectory> parse_store(const std::string& text);
/// Fills in what `profile` has measured of the drive under each directory: its weight, from its
/// speed in the optimizer's sweep, and the bytes in flight that keep it busy. Returns whether
/// `profile` has the sweep of all drives; if not, all weights stay equal.
bool apply_profile(std::vector<StoreDirectory>& store, const MachineProfile& profile);
/// Returns the speed that the drives under `store` reach together in a sweep, which reads and
/// writes, limited by the drive that is slowest for its share; 0 if `profile` lacks a drive.
double profiled_bytes_per_s(const std::vector<StoreDirectory>& store,
                            const MachineProfile& profile);
/// Returns whether one of the directories holds a store, or a stripe of one.
bool store_exists(const std::vector<StoreDirectory>& store);
/// Returns the total size of the files in the store's directories.
std::uint64_t stored_bytes(const std::vector<StoreDirectory>& store);
/// Returns the free space of each directory, such as "73.8 GB free".
std::string free_space(const std::vector<StoreDirectory>& store);
/// Returns a size in decimal units, as disks are sold.
std::string gigabytes(std::uint64_t size_bytes);

}  // namespace ziggurat::cli
