// SPDX-License-Identifier: Apache-2.0
// tiers/store/state_store_open.cc: finds the file of one and the same store on every rank, if
// necessary by finishing a creation that was cut off. store_recovery.h decides what is used of the
// file.
#include <fmt/format.h>

#include <utility>

#include "base/error.h"
#include "tiers/store/state_store_impl.h"
#include "tiers/store/store_recovery.h"
#include "tiers/store/store_survey.h"

namespace ziggurat {
namespace {

class StoreFinder {
 public:
  explicit StoreFinder(StateStore::Impl& store)
      : store_(store), environment_(store.environment), ranks_(store.environment.ranks) {}

  /// Returns the survey of a file that belongs to the same store on every rank, after reading its
  /// contents.
  Task<std::unique_ptr<StoreSurvey>> find() {
    co_await find_store();
    Task<> reading = read();
    Task<> done = together(ranks_, std::move(reading), "open its store");
    co_await std::move(done);
    co_return std::move(survey_);
  }
  std::vector<std::string> notes() { return std::move(notes_); }

 private:
  Task<> read() {
    survey_->check_shape();
    co_await survey_->read_contents();
  }

  /// Finds out to which store each file belongs. Its shape is checked afterwards: if a creation was
  /// cut off between two ranks' renames, the file that is still there may have any shape.
  Task<> find_store() {
    Task<> looking = look_at_final();
    Task<> looked = together(ranks_, std::move(looking), "open its store");
    co_await std::move(looked);
    const std::uint64_t own = survey_ ? survey_->uuid().key() : 0;
    const std::uint64_t lowest = co_await ranks_.min(own);
    const std::uint64_t highest = co_await ranks_.max(own);
    if (highest == 0) {
      const Error none = no_store();
      co_await stop(none);
    }
    if (lowest != highest) {
      co_await finish_creation(own);
    } else if (environment_.io.exists(store_.temporary_path())) {
      notes_.push_back(
          fmt::format("the file {} is left from a creation that was cut off; it is not needed and "
                      "may be deleted",
                      store_.temporary_path()));
    }
  }

  Task<> look_at_final() {
    if (!environment_.io.exists(store_.final_path())) co_return;
    environment_.io.sync_directory(store_.directory);  // a killed creation may have renamed without
                                                       // a sync; from now on the rename is durable
    auto found = StoreSurvey::open(environment_, store_.final_path());
    try {
      co_await found->read_superblocks();
    } catch (const Error& error) {
      // The file has another version or is damaged. It is no store, unless a creation is finished
      // over it.
      if (error.code() != ErrorCode::kDataLoss && error.code() != ErrorCode::kInvalidArgument)
        throw;
      unreadable_ = std::current_exception();
      co_return;
    }
    survey_ = std::move(found);
  }

  Error no_store() const {
    return {ErrorCode::kInvalidArgument,
            fmt::format("there is no store at {}; check `store`, or let `resume=auto` create one",
                        store_.final_path())};
  }

  /// Stops every rank. Ranks whose file is unreadable or of another shape throw that error; if
  /// there are none, all throw `error`.
  Task<> stop(const Error& error) {
    Task<> looking = look_for_a_reason();
    Task<> looked = together(ranks_, std::move(looking), "open its store");
    co_await std::move(looked);
    throw Error(error);
  }

  Task<> look_for_a_reason() {
    if (unreadable_) std::rethrow_exception(unreadable_);
    if (survey_) survey_->check_shape();
    co_return;
  }

  /// Finishes a creation that was cut off. It renames only after every rank has sealed
  /// (StateStore::Impl::publish). So if one rank already has the new name, all others have a sealed
  /// temporary file of that uuid. There is no way back, because the renamed rank's old store is
  /// gone.
  Task<> finish_creation(std::uint64_t own) {
    Task<> looking = look_at_temporary();
    Task<> looked = together(ranks_, std::move(looking), "look at its unfinished store");
    co_await std::move(looked);
    const std::uint64_t forward = created_ ? created_->uuid().key() : own;
    const std::uint64_t lowest = co_await ranks_.min(forward);
    const std::uint64_t highest = co_await ranks_.max(forward);
    const std::uint64_t renamed = co_await ranks_.max(!created_ ? own : 0);
    if (lowest != highest || renamed != highest) {
      const Error different = different_stores(own);
      co_await stop(different);
    }
    Task<> renaming = take_name();
    Task<> named = together(ranks_, std::move(renaming), "finish the creation of its store");
    co_await std::move(named);
  }

  Error different_stores(std::uint64_t own) const {
    return {ErrorCode::kInvalidArgument,
            fmt::format("the ranks' files belong to different stores ({}: {}), so no "
                        "generation is common to them. Nothing was changed. Put back the files "
                        "that belong together, or start from the beginning with `resume=never`",
                        store_.final_path(),
                        own == 0 ? "no file" : fmt::format("uuid key {:016x}", own))};
  }

  Task<> look_at_temporary() {
    if (!environment_.io.exists(store_.temporary_path())) co_return;
    auto found = StoreSurvey::open(environment_, store_.temporary_path());
    try {
      co_await found->read_superblocks();
    } catch (const Error&) {
      co_return;  // half built, so it belongs to no store
    }
    if (found->is_sealed_creation() && !(survey_ && survey_->uuid() == found->uuid()))
      created_ = std::move(found);
  }

  Task<> take_name() {
    if (created_) {
      environment_.io.rename(store_.temporary_path(), store_.final_path());
      survey_ = std::move(created_);
      survey_->file()->set_path(store_.final_path());
      survey_->notes().push_back(
          "the creation of this store was cut off between two ranks' renames, and was finished "
          "now");
    }
    environment_.io.sync_directory(store_.directory);
    co_return;
  }

  StateStore::Impl& store_;
  const StoreEnvironment& environment_;
  Quorum& ranks_;
  std::unique_ptr<StoreSurvey> survey_;   ///< survey of the finished file
  std::unique_ptr<StoreSurvey> created_;  ///< survey of a sealed temporary file of another store
  std::exception_ptr unreadable_;         ///< why the finished file could not be read
  std::vector<std::string> notes_;
};

}  // namespace

Task<std::unique_ptr<StateStore>> StateStore::open(StoreEnvironment environment,
                                                   std::string directory) {
  auto impl = std::make_unique<Impl>(std::move(environment), std::move(directory));
  std::unique_ptr<StateStore> store(new StateStore(std::move(impl)));
  StoreFinder finder(*store->impl_);
  std::unique_ptr<StoreSurvey> survey = co_await finder.find();
  store->impl_->recovery =
      std::make_unique<StoreRecovery>(*store->impl_, std::move(survey), finder.notes());
  co_await store->impl_->recovery->choose();
  co_return store;
}

}  // namespace ziggurat
