// SPDX-License-Identifier: Apache-2.0
// tiers/state_store_open.cc: recovery. Every rank says what its file holds; together they choose
// the newest generation that is whole on all of them, erase what is newer, and begin a new epoch.
// ARCHITECTURE.md has the crash schedule behind each rule.
//
// Every decision is taken from values that all ranks have (min and max of each one's), and a rank
// that fails says so at the next meeting (together()), so that all stop at the same place. Nothing
// is written before everything has been read and agreed.
#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "tiers/state_store_impl.h"
#include "tiers/store_survey.h"

namespace ziggurat {
namespace {

class Recovery {
 public:
  explicit Recovery(StateStore::Impl& store)
      : store_(store), environment_(store.environment), ranks_(store.environment.ranks) {}

  Task<> run() {
    co_await find_store();
    Task<> reading = survey_->read_contents();
    Task<> read = together(ranks_, std::move(reading), "read its store");
    co_await std::move(read);
    const std::uint64_t generation = co_await agree_generation();
    co_await agree_history(generation);
    // All have read, checked and agreed; only now is anything changed.
    const std::uint64_t epoch = 1 + co_await ranks_.max(survey_->epoch_seen());
    store_.attempt = co_await ranks_.max(random_u64());
    Task<> cleaning = survey_->leave_only(generation);
    Task<> cleaned =
        together(ranks_, std::move(cleaning), "erase what is newer than the agreed generation");
    co_await std::move(cleaned);  // a barrier too: no record is written while any rank still has a
                                  // newer superblock
    hand_over(generation, epoch);
  }

 private:
  /// The file of one and the same store on every rank, finishing a creation that was cut off
  /// between two ranks' renames.
  Task<> find_store() {
    Task<> looking = look_at_final();
    Task<> looked = together(ranks_, std::move(looking), "open its store");
    co_await std::move(looked);
    const std::uint64_t own = survey_ ? survey_->uuid().key() : 0;
    const std::uint64_t lowest = co_await ranks_.min(own);
    const std::uint64_t highest = co_await ranks_.max(own);
    if (highest == 0)
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: there is no store here; check `store`, or let `resume=auto` create "
                      "one",
                      store_.final_path()));
    if (lowest != highest) {
      co_await finish_creation(own);
    } else if (environment_.io.exists(store_.temporary_path())) {
      notes_.push_back(fmt::format(
          "{} is left from a creation that was cut off; it is not needed and may be deleted",
          store_.temporary_path()));
    }
  }

  Task<> look_at_final() {
    if (!environment_.io.exists(store_.final_path())) co_return;
    environment_.io.sync_directory(store_.directory);  // a killed creation may have renamed and not
                                                       // synced; then it counts from now
    survey_ = StoreSurvey::open(environment_, store_.final_path());
    co_await survey_->read_superblocks();
  }

  /// A creation renames only after every rank has sealed (StateStore::Impl::publish). So if one
  /// rank already has the new name, all others have a sealed temporary file of that uuid, and the
  /// only way on is forward: the renamed rank's old store is gone.
  Task<> finish_creation(std::uint64_t own) {
    Task<> looking = look_at_temporary();
    Task<> looked = together(ranks_, std::move(looking), "look at its unfinished store");
    co_await std::move(looked);
    const std::uint64_t forward = created_ ? created_->uuid().key() : own;
    const std::uint64_t lowest = co_await ranks_.min(forward);
    const std::uint64_t highest = co_await ranks_.max(forward);
    const std::uint64_t renamed = co_await ranks_.max(!created_ ? own : 0);
    if (lowest != highest || renamed != highest)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the ranks' files belong to different stores ({} here), so no "
                              "generation is common to them; nothing "
                              "was changed. Put back the files that belong together, or start anew "
                              "with `resume=never`",
                              store_.final_path(),
                              own == 0 ? "no file" : fmt::format("uuid key {:016x}", own)));
    Task<> renaming = take_name();
    Task<> named = together(ranks_, std::move(renaming), "finish the creation of its store");
    co_await std::move(named);
  }

  Task<> look_at_temporary() {
    if (!environment_.io.exists(store_.temporary_path())) co_return;
    auto found = StoreSurvey::open(environment_, store_.temporary_path());
    try {
      co_await found->read_superblocks();
    } catch (const Error&) {
      co_return;  // half built; not a store of anybody's
    }
    if (found->is_sealed_creation() && !(survey_ && survey_->uuid() == found->uuid()))
      created_ = std::move(found);
  }

  Task<> take_name() {
    if (created_) {
      environment_.io.rename(store_.temporary_path(), store_.final_path());
      survey_ = std::move(created_);
      survey_->file().set_path(store_.final_path());
      survey_->notes().push_back(
          "the creation of this store was cut off between two ranks' renames; finished now");
    }
    environment_.io.sync_directory(store_.directory);
    co_return;
  }

  /// The newest generation that is whole on every rank: each offers its newest below the bound, the
  /// lowest offer is the next bound.
  Task<std::uint64_t> agree_generation() {
    constexpr std::uint64_t kNothing = 0;  // offers are generation + 1
    std::uint64_t bound = SlotEntry::kNone;
    for (;;) {
      const auto newest = survey_->newest_candidate(bound);
      const std::uint64_t offer = newest ? *newest + 1 : kNothing;
      const std::uint64_t lowest = co_await ranks_.min(offer);
      const std::uint64_t highest = co_await ranks_.max(offer);
      if (lowest == kNothing) throw nothing_common();
      if (lowest == highest) co_return lowest - 1;
      bound = lowest - 1;
    }
  }

  Error nothing_common() const {
    std::string found;
    for (const std::string& note : survey_->notes()) found += (found.empty() ? "" : "; ") + note;
    const auto newest = survey_->newest_candidate(SlotEntry::kNone);
    return {
        ErrorCode::kDataLoss,
        fmt::format("{}: no generation is whole on every rank (here {}{}{}). Nothing was changed. "
                    "Restore the directory from a copy "
                    "or a checkpoint, or start anew with `resume=never`",
                    survey_->path(), newest ? fmt::format("generation {} is", *newest) : "none is",
                    found.empty() ? "" : ": ", found)};
  }

  /// The chosen generation must be of one history on all ranks; and wherever something newer or
  /// damaged was seen on any rank, every record of it must verify before the newer is given up.
  Task<> agree_history(std::uint64_t generation) {
    const Superblock& chosen = survey_->generation(generation).superblock;
    const std::uint64_t lowest = co_await ranks_.min(chosen.lineage);
    const std::uint64_t highest = co_await ranks_.max(chosen.lineage);
    if (lowest != highest)
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("{}: generation {} was made in different histories on different "
                              "ranks (epoch {} here); was one rank's "
                              "file restored from a copy? Restore all of them from the same "
                              "moment. Nothing was changed",
                              survey_->path(), generation, chosen.epoch));
    const std::uint64_t newest = co_await ranks_.max(survey_->newest_seen());
    const std::uint64_t damaged = co_await ranks_.max(survey_->damaged() ? 1 : 0);
    Task<> checking = check_history(generation, newest > generation || damaged != 0);
    Task<> checked = together(ranks_, std::move(checking), "verify the generation to fall back to");
    co_await std::move(checked);
    if (newest > generation)
      notes_.push_back(
          fmt::format("fell back from generation {} to {}, the newest whole on every rank; all its "
                      "records verified",
                      newest, generation));
  }

  Task<> check_history(std::uint64_t generation, bool verify) {
    survey_->check_chain(generation);
    if (verify) co_await survey_->verify_records(generation);
  }

  void hand_over(std::uint64_t generation, std::uint64_t epoch) {
    StoreSurvey::Generation chosen = survey_->generation(generation);
    auto& notes = store_.state.notes;
    notes = std::move(survey_->notes());
    notes.insert(notes.end(), notes_.begin(), notes_.end());
    const auto level = survey_->damaged() ? spdlog::level::warn : spdlog::level::info;
    StoreSpec spec = survey_->spec();
    StoreLayout layout = survey_->layout();
    store_.file = survey_->take_file();
    store_.adopt(std::move(spec), std::move(layout));
    store_.newest = chosen.superblock;
    store_.tables[parity_of(generation)] = std::move(chosen.table);
    store_.next_generation = generation + 1;
    store_.durable_everywhere = generation;
    store_.state.generation = generation;
    store_.state.epoch = epoch;
    store_.state.blob = std::move(chosen.blob);
    for (const std::string& note : notes) log().log(level, "{}: {}", store_.file->path(), note);
  }

  StateStore::Impl& store_;
  const StoreEnvironment& environment_;
  Quorum& ranks_;
  std::unique_ptr<StoreSurvey> survey_;   ///< of the finished file
  std::unique_ptr<StoreSurvey> created_;  ///< of a sealed temporary file of another store
  std::vector<std::string> notes_;
};

}  // namespace

Task<std::unique_ptr<StateStore>> StateStore::open(StoreEnvironment environment,
                                                   std::string directory) {
  auto impl = std::make_unique<Impl>(std::move(environment), std::move(directory));
  std::unique_ptr<StateStore> store(new StateStore(std::move(impl)));
  Recovery recovery(*store->impl_);
  co_await recovery.run();
  co_return store;
}

}  // namespace ziggurat
