// SPDX-License-Identifier: Apache-2.0
// integrations/cli/store_paths.h: what --store names: one directory, or several that share a store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/engine/engine_config.h"
#include "core/plan/machine_profile.h"

namespace ziggurat::cli {

/// "DIR" or "DIR,DIR2,...". Errors: UsageError for an empty or repeated name.
std::vector<StoreDirectory> parse_store(const std::string& text);
/// Fills in what `profile` measured of the drive under each directory: its weight, by its rate in
/// the optimizer's sweep, and what keeps it busy. Equal weights if it lacks one of them; returns
/// whether it had all.
bool apply_profile(std::vector<StoreDirectory>& store, const MachineProfile& profile);
/// What the drives under `store` do together, read and written by a sweep, as far as the slowest
/// for its share lets them; 0 if `profile` lacks one of them.
double profiled_bytes_per_s(const std::vector<StoreDirectory>& store,
                            const MachineProfile& profile);
/// A store, or a stripe of one, is in one of them.
bool store_exists(const std::vector<StoreDirectory>& store);
/// Bytes of the files in them.
std::uint64_t stored_bytes(const std::vector<StoreDirectory>& store);
/// "73.8 GB free", of each directory.
std::string free_space(const std::vector<StoreDirectory>& store);
/// As disks are sold: decimal.
std::string gigabytes(std::uint64_t size_bytes);

}  // namespace ziggurat::cli
