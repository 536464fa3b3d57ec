// SPDX-License-Identifier: Apache-2.0
// core/engine/state/reshard_in_place.cc: reads and locks the old store, and puts the new one in its
// place.
#include "core/engine/state/reshard_in_place.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "base/log.h"

namespace ziggurat {

/// Throws if a setting makes no sense. The other ranks' settings may, and they would wait.
void ReshardInPlace::validate() {
  try {
    old_.validate();
  } catch (...) {
    old_.fail(std::current_exception());
    throw;
  }
}

Task<> ReshardInPlace::look() {
  Runtime& runtime = old_.runtime();
  Task<std::unique_ptr<StoredState>> opening =
      StoredState::open(runtime.reactor, runtime.jobs(), old_.storage().places);
  stored_ = co_await std::move(opening);
}

Task<> ReshardInPlace::require() {
  judge_.require(*stored_);
  if (old_.config().before_reshard) old_.config().before_reshard(stored_->content());
  co_return;
}

Task<> ReshardInPlace::lock() {
  succession_->lock_old();
  co_return;
}

/// Logs what was noted of the old store, which nothing else will describe. Returns false.
bool ReshardInPlace::say_notes() {
  for (const std::string& its : old_.notes()) log().info("{}", its);
  return false;
}

/// Reads and locks the old store. Returns false if there is no store, or one that needs no
/// conversion.
Task<bool> ReshardInPlace::begin() {
  constexpr const char* kReads = "read the store that is resharded";
  validate();
  old_.open_channels();
  co_await old_.agree_on_settings();  // another rank may have been told not to reshard
  old_.open_storage();
  co_await old_.end_succession();
  if (!co_await old_.store_found()) co_return say_notes();
  Storage& storage = old_.storage();
  Task<> looked = old_.unless_lost(together(storage.quorum, look(), kReads));
  co_await std::move(looked);
  const bool fits = judge_.fits(old_, *stored_);
  if (co_await storage.quorum.min(fits ? 1 : 0) != 0) co_return say_notes();
  Task<> required = together(storage.quorum, require(), kReads);
  co_await std::move(required);
  succession_.emplace(old_.runtime().reactor, storage.places);
  order_ = succession_->order();
  Task<> locking = first_rank_does(storage.quorum, lock(), "lock the store");
  co_await std::move(locking);
  // The store's owner may have made a step between the first look and the lock.
  Task<> again = old_.unless_lost(together(storage.quorum, look(), kReads));
  co_await std::move(again);
  Task<> still = together(storage.quorum, require(), kReads);
  co_await std::move(still);
  if (judge_.require_together) co_await judge_.require_together(storage.ranks);
  co_return true;
}

/// Returns the config of an engine beside the old store.
EngineConfig ReshardInPlace::beside() const {
  EngineConfig config = old_.config();
  config.resume = EngineConfig::Resume::kNever;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    config.store[i] = old_.config().store[order_[i]];
    config.store[i].path = StoreSuccession::folder_in(config.store[i].path);
  }
  return config;
}

void ReshardInPlace::note(TrainingState& engine) const {
  const int ranks = stored_->content().layout.ranks;
  std::vector<std::string> notes = old_.notes();
  notes.push_back(fmt::format("the store was converted in place from a store of {} rank{}", ranks,
                              ranks == 1 ? "" : "s"));
  engine.notes().insert(engine.notes().begin(), notes.begin(), notes.end());
}

/// Puts the new store in the old one's place.
Task<> ReshardInPlace::complete(TrainingState& engine) {
  Quorum& ranks = old_.storage().quorum;
  co_await ranks.barrier();  // now every rank's part is complete
  Task<> completing =
      first_rank_does(ranks, succession_->complete(), "put the resharded store in its place");
  co_await std::move(completing);
  std::vector<std::string> directories;
  for (const std::size_t place : order_) directories.push_back(old_.config().store[place].path);
  engine.moved(directories);
}

Task<> ReshardInPlace::close() {
  succession_.reset();
  stored_.reset();
  old_.close_storage();
  co_return;
}

}  // namespace ziggurat
