// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_files.h: the files of a store as its directories show them: their names, and
// what a process that died has left to do with them. Reactor's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/runtime/reactor.h"
#include "tiers/store/striping.h"

namespace ziggurat {

/// Whose file a name is.
struct StoreFileName {
  int rank = 0;
  std::uint32_t stripe = 0;
  bool is_unfinished = false;  ///< under construction
};
/// Returns nothing if no file of a store has this name.
std::optional<StoreFileName> store_file_name(const std::string& name);
/// Returns whether `name` is that of a finished file of some rank: "rank00000.ziggurat".
bool is_store_file(const std::string& name);

/// Finishes a creation that was cut off between two ranks' renames (StateStore::Impl::publish), for
/// all ranks that have files in `places`, however many ranks there are now. Where no creation was
/// decided nothing is changed. Returns notes for the trainer, one for each file that got its name.
/// Errors: kUnavailable while another process uses these files; errno's.
Task<std::vector<std::string>> finish_creation(Reactor& reactor,
                                               std::span<const StripePlace> places);

}  // namespace ziggurat
