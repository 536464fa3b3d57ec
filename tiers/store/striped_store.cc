// SPDX-License-Identifier: Apache-2.0
// tiers/store/striped_store.cc: maps chunks to stripes and back. All stripes make every call at the
// same time, because they meet in it.
#include "tiers/store/striped_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "tiers/store/state_store_impl.h"

namespace ziggurat {
namespace {

bool holds(const StripePlace& place, int rank, std::uint32_t stripe) {
  return place.io.exists(place.directory + "/" + StateStore::file_name(rank, stripe));
}

bool holds_unfinished(const StripePlace& place, int rank, std::uint32_t stripe) {
  return place.io.exists(place.directory + "/" + StateStore::temporary_name(rank, stripe));
}

}  // namespace

StripedStore::StripedStore(Environment environment)
    : environment_(std::move(environment)),
      meeting_(environment_.reactor, static_cast<int>(environment_.places.size()),
               &environment_.ranks),
      stripes_(environment_.places.size()) {
  const Quorum& ranks = environment_.ranks;
  quorums_.reserve(stripes_.size());  // the stores keep references to them
  ZIGGURAT_CHECK(environment_.scratch.size() >= scratch_bytes(stripes_.size()),
                 "scratch memory of {} bytes", environment_.scratch.size());
  for (std::size_t i = 0; i < stripes_.size(); ++i)
    quorums_.emplace_back(meeting_, ranks.rank(), ranks.world_size());
}

StoreEnvironment StripedStore::stripe_environment(std::uint32_t stripe) {
  StripePlace& place = environment_.places[stripe];
  return {.reactor = environment_.reactor,
          .io = place.io,
          .ranks = quorums_[stripe],
          .observers = place.observers,
          .staging = environment_.staging,
          .scratch =
              environment_.scratch.subspan(stripe * kScratchBytesPerStripe, kScratchBytesPerStripe),
          .stripe_index = stripe,
          .stripe_count = static_cast<std::uint32_t>(stripes_.size())};
}

Task<> StripedStore::on_all(std::vector<Task<>> tasks) {
  std::vector<std::exception_ptr> errors(tasks.size());
  WorkGroup group(environment_.reactor);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    group.spawn([](Task<> task, Meeting& meeting, std::exception_ptr& error) -> Task<> {
      try {
        co_await std::move(task);
      } catch (...) {
        error = std::current_exception();
        meeting.lose(error);  // so that no stripe waits for one that has given up
      }
    }(std::move(tasks[i]), meeting_, errors[i]));
  }
  co_await group.wait_idle();
  std::ranges::stable_partition(errors, [](const std::exception_ptr& error) {
    return error && !followed_from_another(error);
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

bool StripedStore::exists(std::span<const StripePlace> places, int rank) {
  for (const StripePlace& place : places) {
    for (std::uint32_t stripe = 0; stripe < kStripesMax; ++stripe) {
      if (holds(place, rank, stripe)) return true;
    }
  }
  return false;
}

Task<std::unique_ptr<StripedStore>> StripedStore::create(Environment environment, StoreSpec spec) {
  const auto assigned = assign_stripes(spec.record_bytes, environment.places);
  std::unique_ptr<StripedStore> store(new StripedStore(std::move(environment)));
  std::vector<StoreSpec> specs(store->stripes_.size(), spec);
  for (StoreSpec& each : specs) {
    each.record_bytes.clear();
    each.constant.clear();
  }
  for (ChunkId chunk = 0; chunk < assigned.size(); ++chunk) {
    StoreSpec& mine = specs[assigned[chunk]];
    mine.record_bytes.push_back(spec.record_bytes[chunk]);
    if (!spec.constant.empty()) mine.constant.push_back(spec.constant[chunk]);
    mine.chunks.push_back(chunk);
  }
  if (specs.size() == 1) specs[0].chunks.clear();
  std::vector<Task<>> tasks;
  for (std::uint32_t stripe = 0; stripe < specs.size(); ++stripe) {
    tasks.push_back(store->create_stripe(stripe, std::move(specs[stripe])));
  }
  Task<> all = store->on_all(std::move(tasks));
  co_await std::move(all);
  store->adopt_homes();
  store->adopt_state();
  co_return store;
}

Task<> StripedStore::create_stripe(std::uint32_t stripe, StoreSpec spec) {
  Task<std::unique_ptr<StateStore>> creating = StateStore::create(
      stripe_environment(stripe), environment_.places[stripe].directory, std::move(spec));
  stripes_[stripe] = co_await std::move(creating);
}

Task<std::unique_ptr<StripedStore>> StripedStore::open(Environment environment) {
  std::unique_ptr<StripedStore> store(new StripedStore(std::move(environment)));
  Task<> finding = store->find_places();
  Task<> found = together(store->environment_.ranks, std::move(finding), "find its store");
  co_await std::move(found);
  std::vector<Task<>> tasks;
  for (std::uint32_t stripe = 0; stripe < store->stripes_.size(); ++stripe)
    tasks.push_back(store->open_stripe(stripe));
  Task<> all = store->on_all(std::move(tasks));
  co_await std::move(all);
  store->adopt_homes();
  store->adopt_state();
  co_return store;
}

Task<> StripedStore::open_stripe(std::uint32_t stripe) {
  Task<std::unique_ptr<StateStore>> opening =
      StateStore::open(stripe_environment(stripe), environment_.places[stripe].directory);
  stripes_[stripe] = co_await std::move(opening);
}

Task<bool> StripedStore::settle(std::vector<RecordDamage> damaged) {
  std::vector<std::vector<RecordDamage>> by_stripe(stripes_.size());
  for (RecordDamage& each : damaged) {
    const Home home = homes_[each.chunk];
    each.chunk = home.chunk;
    by_stripe[home.stripe].push_back(std::move(each));
  }
  bool stands = false;  // every stripe sets the same value
  std::vector<Task<>> tasks;
  for (std::uint32_t stripe = 0; stripe < stripes_.size(); ++stripe)
    tasks.push_back(settle_stripe(stripe, std::move(by_stripe[stripe]), stands));
  Task<> all = on_all(std::move(tasks));
  co_await std::move(all);
  adopt_state();
  co_return stands;
}

Task<> StripedStore::settle_stripe(std::uint32_t stripe, std::vector<RecordDamage> damaged,
                                   bool& stands) {
  Task<bool> settling = stripes_[stripe]->settle(std::move(damaged));
  stands = co_await std::move(settling);
}

/// Puts the places in the order of the stripes that they hold.
Task<> StripedStore::find_places() {
  const int rank = environment_.ranks.rank();
  auto& places = environment_.places;
  const bool striped = places.size() > 1 && exists(places, rank);
  std::vector<StripePlace> ordered;
  std::vector<bool> taken(places.size());
  for (std::uint32_t stripe = 0; striped && stripe < places.size(); ++stripe) {
    const auto find = [&](auto&& in) {
      for (std::size_t i = 0; i < places.size(); ++i) {
        const std::size_t at = (stripe + i) % places.size();  // tries the given order first
        if (!taken[at] && in(places[at], rank, stripe)) return at;
      }
      return places.size();
    };
    std::size_t at = find(holds);
    if (at == places.size()) at = find(holds_unfinished);
    if (at == places.size()) {
      std::string where;
      for (const StripePlace& place : places)
        where += (where.empty() ? "" : ", ") + place.directory;
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format(
              "the file {}, stripe {} of this store, is in none of {}; give all directories "
              "with which the store was made, and no others",
              StateStore::file_name(rank, stripe), stripe, where));
    }
    taken[at] = true;
    ordered.push_back(places[at]);
  }
  if (striped) places.swap(ordered);
  co_return;
}

void StripedStore::moved(std::span<const std::string> directories) {
  for (std::size_t i = 0; i < stripes_.size(); ++i) {
    environment_.places[i].directory = directories[i];
    stripes_[i]->moved(directories[i]);
  }
}

void StripedStore::adopt_homes() {
  std::size_t count = 0;
  for (const auto& stripe : stripes_) count += stripe->chunk_count();
  homes_.assign(count, {.stripe = kStripesMax});
  for (std::uint32_t s = 0; s < stripes_.size(); ++s) {
    for (ChunkId local = 0; local < stripes_[s]->chunk_count(); ++local) {
      const ChunkId chunk = stripes_[s]->chunk_name(local);
      if (chunk >= count || homes_[chunk].stripe != kStripesMax)
        throw Error(ErrorCode::kDataLoss,
                    foreign_stripe(environment_.places[s].directory, chunk, count));
      homes_[chunk] = {.stripe = s, .chunk = local};
    }
  }
}

void StripedStore::adopt_state() {
  state_ = stripes_[0]->state();
  for (std::size_t i = 1; i < stripes_.size(); ++i) {
    for (const std::string& note : stripes_[i]->state().notes) {
      if (std::ranges::find(state_.notes, note) == state_.notes.end()) state_.notes.push_back(note);
    }
  }
}

std::uint64_t StripedStore::record_bytes(ChunkId chunk) const noexcept {
  return at(chunk).record_bytes(homes_[chunk].chunk);
}

void StripedStore::set_durable_everywhere(std::uint64_t generation) noexcept {
  for (const auto& stripe : stripes_) stripe->set_durable_everywhere(generation);
}

void StripedStore::require_writable() const {
  for (const auto& stripe : stripes_) stripe->require_writable();
  if (broken_) throw Error(*broken_);
}

std::uint64_t StripedStore::durable_everywhere() const noexcept {
  std::uint64_t lowest = stripes_[0]->durable_everywhere();
  for (const auto& stripe : stripes_) lowest = std::min(lowest, stripe->durable_everywhere());
  return lowest;
}

std::uint64_t StripedStore::write_seed(ChunkId chunk, std::uint64_t generation) const noexcept {
  return at(chunk).write_seed(homes_[chunk].chunk, generation);
}

StateStore::Expected StripedStore::expected(ChunkId chunk, std::uint64_t generation) const {
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  return at(chunk).expected(homes_[chunk].chunk, generation);
}

Task<> StripedStore::read(ChunkId chunk, std::uint64_t generation, std::span<std::byte> record,
                          IoPriority priority, std::uint64_t skipped_bytes) {
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  return at(chunk).read(homes_[chunk].chunk, generation, record, priority, skipped_bytes);
}

Task<> StripedStore::write(ChunkId chunk, std::uint64_t generation,
                           std::span<const std::byte> record, std::uint64_t hash,
                           IoPriority priority) {
  require_writable();
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  // The stripes of one rank may not run ahead of each other either.
  ZIGGURAT_CHECK(
      generation == 0 || durable_everywhere() + 1 == generation,
      "chunk {}: generation {} may not be written, because only {} is durable in every stripe",
      chunk, generation, durable_everywhere());
  return at(chunk).write(homes_[chunk].chunk, generation, record, hash, priority);
}

Task<> StripedStore::repair(ChunkId chunk, std::span<const std::byte> record) {
  ZIGGURAT_CHECK(chunk < chunk_count(), "chunk {} of {}", chunk, chunk_count());
  return at(chunk).repair(homes_[chunk].chunk, record);
}

void StripedStore::discard(std::uint64_t generation) {
  for (const auto& stripe : stripes_) stripe->discard(generation);
}

Error StripedStore::corrupt_record(ChunkId chunk, std::uint64_t generation) const {
  return at(chunk).corrupt_record(homes_[chunk].chunk, generation);
}

void StripedStore::set_copies(const std::string& elsewhere) {
  for (const auto& stripe : stripes_) stripe->set_copies(elsewhere);
}

std::string StripedStore::place_of(ChunkId chunk) const {
  return at(chunk).place_of(homes_[chunk].chunk);
}

Task<> StripedStore::commit(std::uint64_t generation, std::span<const std::byte> blob,
                            const std::function<void()>& before_seal) {
  require_writable();
  bool announced = false;
  const std::function<void()> once = [&] {
    if (!std::exchange(announced, true) && before_seal) before_seal();
  };
  std::vector<Task<>> tasks;
  for (const auto& stripe : stripes_) tasks.push_back(stripe->commit(generation, blob, once));
  Task<> all = on_all(std::move(tasks));
  std::exception_ptr error;
  try {
    co_await std::move(all);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    part_ways(generation);
    std::rethrow_exception(error);
  }
  state_.generation = generation;
  state_.blob.assign(blob.begin(), blob.end());
}

/// Handles a failed commit of `generation`. If a stripe has sealed it nevertheless, the store
/// cannot go back to the previous generation, and only a recovery can continue.
void StripedStore::part_ways(std::uint64_t generation) {
  const auto sealed = std::ranges::find_if(
      stripes_, [&](const auto& stripe) { return stripe->durable_generation() == generation; });
  if (sealed == stripes_.end()) return;
  const auto at = static_cast<std::size_t>(sealed - stripes_.begin());
  broken_.emplace(ErrorCode::kUnavailable,
                  fmt::format("nothing is written to this store any more, because generation {} is "
                              "sealed in {}, but not in every directory of the store. Close the "
                              "engine, check the drives, and open the store again",
                              generation, environment_.places[at].directory));
}

std::vector<StripedStore::Share> StripedStore::shares() const {
  std::vector<Share> shares;
  for (std::size_t i = 0; i < stripes_.size(); ++i) {
    Share share{.directory = environment_.places[i].directory};
    for (ChunkId chunk = 0; chunk < stripes_[i]->chunk_count(); ++chunk)
      share.record_bytes += stripes_[i]->record_bytes(chunk);
    shares.push_back(std::move(share));
  }
  return shares;
}

}  // namespace ziggurat
