// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_recovery.cc: falls back from generation to generation, and reports that.
#include "tiers/store/store_recovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"

namespace ziggurat {

StoreRecovery::StoreRecovery(StateStore::Impl& store, std::unique_ptr<StoreSurvey> survey,
                             std::vector<std::string> notes)
    : store_(store),
      ranks_(store.environment.ranks),
      survey_(std::move(survey)),
      notes_(std::move(notes)) {
  store_.file = survey_->file();
  store_.adopt(survey_->spec(), survey_->layout());
}

/// Chooses a generation. Each stripe offers its newest below the limit, and the lowest offer is the
/// next limit, until all offer the same generation of the same history.
Task<> StoreRecovery::choose() {
  constexpr std::uint64_t kNothing = 0;  // offers are generation + 1
  for (;;) {
    const auto newest = survey_->newest_candidate(limit_);
    const std::uint64_t offer = newest ? *newest + 1 : kNothing;
    const std::uint64_t lowest = co_await ranks_.min(offer);
    const std::uint64_t highest = co_await ranks_.max(offer);
    if (lowest == kNothing) throw_nothing_left();
    if (lowest != highest) {
      limit_ = lowest;
      continue;
    }
    const Superblock& offered = survey_->generation(*newest).superblock;
    const std::uint64_t lineage = co_await ranks_.min(offered.lineage);
    const std::uint64_t other = co_await ranks_.max(offered.lineage);
    if (lineage == other) break;
    losses_.push_back(
        fmt::format("generation {} has different histories on different ranks or drives "
                    "(this file's has epoch {}; perhaps one of the files was restored from a copy)",
                    *newest, offered.epoch));
    limit_ = *newest;
  }
  adopt(*survey_->newest_candidate(limit_));
}

/// Sets the store's state to that of `generation`, so that it can be read; it must not be written
/// to yet.
void StoreRecovery::adopt(std::uint64_t generation) {
  const StoreSurvey::Generation& chosen = survey_->generation(generation);
  store_.newest = chosen.superblock;
  store_.tables[parity_of(generation)] = chosen.table;
  SlotTable& other = store_.tables[parity_of(generation + 1)];
  if (const auto* before = survey_->before(generation); before != nullptr) {
    other = before->table;
  } else {
    other.assign(chosen.table.size(), {});
  }
  store_.next_generation = generation + 1;
  store_.durable_everywhere = generation;
  store_.state.generation = generation;
  store_.state.epoch = chosen.superblock.epoch;
  store_.state.uuid = chosen.superblock.uuid;
  store_.state.blob = chosen.blob;
}

std::string StoreRecovery::describe(const std::vector<RecordDamage>& damaged) const {
  const std::uint64_t candidate = store_.state.generation;
  const RecordDamage& first = damaged.front();
  return fmt::format(
      "generation {} is damaged in {} of {} records; the first is that of chunk {} ({} at offset "
      "{}): "
      "{}",
      candidate, damaged.size(), store_.layout.record_bytes.size(),
      store_.spec.chunk_name(first.chunk), format_bytes(store_.layout.record_bytes[first.chunk]),
      store_.layout.record_offset(first.chunk, candidate), first.fault);
}

Task<bool> StoreRecovery::settle(std::vector<RecordDamage> damaged) {
  if (!damaged.empty()) {
    losses_.push_back(describe(damaged));
    if (native_ == 0) native_ = damaged.front().native;
  }
  const bool anywhere = co_await ranks_.max(damaged.empty() ? 0 : 1) != 0;
  if (anywhere) {
    limit_ = store_.state.generation;
    co_await choose();
    co_return false;
  }
  co_await begin_epoch();
  co_return true;
}

/// Begins a new epoch. All stripes have read, compared and agreed; only now is anything changed.
Task<> StoreRecovery::begin_epoch() {
  const std::uint64_t generation = store_.state.generation;
  const std::uint64_t newest = co_await ranks_.max(survey_->newest_seen());
  const std::uint64_t epoch = 1 + co_await ranks_.max(survey_->epoch_seen());
  store_.attempt = co_await ranks_.max(random_u64());
  Task<> cleaning = survey_->leave_only(generation);
  Task<> cleaned =
      together(ranks_, std::move(cleaning), "erase what is newer than the agreed generation");
  co_await std::move(cleaned);  // a barrier too, so that no record is written while any rank still
                                // has a newer superblock
  store_.state.epoch = epoch;
  if (newest > generation)
    notes_.push_back(fmt::format(
        "the store fell back from generation {} to generation {}, the newest that is whole on "
        "every rank; all records of that generation were verified",
        newest, generation));
  report();
}

void StoreRecovery::report() {
  auto& notes = store_.state.notes;
  notes = std::move(survey_->notes());
  notes.insert(notes.end(), losses_.begin(), losses_.end());
  notes.insert(notes.end(), notes_.begin(), notes_.end());
  const bool lost = survey_->damaged() || !losses_.empty();
  for (const std::string& note : notes) {
    if (lost) {
      log().warn("{}: {}", store_.file->path(), note);
    } else {
      log().info("{}: {}", store_.file->path(), note);
    }
  }
}

void StoreRecovery::throw_nothing_left() const {
  std::vector<std::string> all = survey_->notes();
  all.insert(all.end(), losses_.begin(), losses_.end());
  std::string found;
  for (const std::string& note : all) found += (found.empty() ? "" : "; ") + note;
  const bool elsewhere = found.empty();
  if (elsewhere) {
    const auto newest = survey_->newest_candidate(SlotEntry::kNone);
    found = newest ? fmt::format("generation {} may be whole", *newest) : "none is";
  }
  const char* one_slot =
      store_.layout.slots == 1
          ? ". With `slots=1` each generation is written over the previous one, so "
            "the store has no older generation"
          : "";
  const std::string message = fmt::format(
      "{}: no generation is whole on every rank and drive (in this file: {}){}. Nothing was "
      "changed. "
      "Restore "
      "the store from a copy or a checkpoint, or start from the beginning with `resume=never`",
      survey_->path(), found, one_slot);
  // This rank finds nothing wrong with its own file, and stops because of another rank's.
  if (elsewhere) throw PeerFailed(ErrorCode::kDataLoss, message, native_);
  throw Error(ErrorCode::kDataLoss, message, native_);
}

}  // namespace ziggurat
