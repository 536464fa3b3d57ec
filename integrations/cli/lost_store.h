// SPDX-License-Identifier: Apache-2.0
// integrations/cli/lost_store.h: what is left of a store of which no generation is whole, kept
// while a new one takes its place.
//
// Its files get second names (hard links) in DIR/lost-N, and the new store's take the first ones
// when it is whole: so whenever the machine dies one of the two stores is in its place, and every
// byte of the lost one is somewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/engine/engine_config.h"

namespace ziggurat::cli {

/// "lost-1".
std::string lost_folder(std::uint64_t number);
/// Under which the files of `store` that this rank sees are kept, if an earlier start was cut off
/// after keep_lost(); else the next that is free. None below `first`.
std::uint64_t lost_number(const std::vector<StoreDirectory>& store, std::uint64_t first = 1);
/// The number for all ranks: drives of each machine's own may have kept other stores under other
/// numbers. Every rank calls it. `share` gives every rank's number for this rank's.
std::uint64_t agreed_lost_number(
    const std::vector<StoreDirectory>& store,
    const std::function<std::vector<std::uint64_t>(std::uint64_t own)>& share);
/// Gives all files of the store that this rank sees a second name there; durable when it returns.
/// Ranks that see the same directories may call it at once. Errors: errno's, where the filesystem
/// knows no second names.
void keep_lost(const std::vector<StoreDirectory>& store, std::uint64_t number);
/// The new store is whole: removes the first names that it has not taken, those of ranks that it
/// does not have. What is not kept stays.
void leave_lost(const std::vector<StoreDirectory>& store, std::uint64_t number);

}  // namespace ziggurat::cli
