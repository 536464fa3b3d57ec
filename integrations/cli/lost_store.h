// SPDX-License-Identifier: Apache-2.0
// integrations/cli/lost_store.h: keeps the files of a store that has no whole generation, while a
// new store takes its place.
//
// The lost store's files get second names (hard links) in DIR/lost-N, and the new store's files
// take the first names once the new store is whole. So one of the two stores is in place whenever
// the machine dies, and no byte of the lost store is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/engine/engine_config.h"

namespace ziggurat::cli {

/// Returns the name of the folder with this number, such as "lost-1".
std::string lost_folder(std::uint64_t number);
/// Returns the number under which the files of `store` that this rank sees are kept, if an earlier
/// start was cut off after keep_lost(); otherwise the next number under which nothing is
/// kept. The result is at least `first`.
std::uint64_t lost_number(const std::vector<StoreDirectory>& store, std::uint64_t first = 1);
/// Returns the same number on all ranks, because the drives of each machine may have kept other
/// stores under other numbers. Every rank must call it. `share` takes the number of this rank and
/// returns those of all ranks.
std::uint64_t agreed_lost_number(
    const std::vector<StoreDirectory>& store,
    const std::function<std::vector<std::uint64_t>(std::uint64_t own)>& share);
/// Gives all files of the store that this rank sees a second name in lost-`number`, durably. Ranks
/// that see the same directories may call it at the same time. Errors: system errors, also if the
/// filesystem has no hard links.
void keep_lost(const std::vector<StoreDirectory>& store, std::uint64_t number);
/// Removes those first names of the lost store's files that the new store, which is whole now, has
/// not taken because it has fewer ranks. A file without a second name stays.
void leave_lost(const std::vector<StoreDirectory>& store, std::uint64_t number);

}  // namespace ziggurat::cli
