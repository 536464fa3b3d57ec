// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_recovery.h: decides from which generation a store continues. Every rank and
// stripe says which generations its file has. Together they try the newest one that is whole on all
// of them, and if one of its records turns out to be damaged, the previous one. Private to tiers/.
//
// Every decision is made from values that all know (the min and max over all). A rank that fails
// says so at the next meeting (together()), so that all stop at the same point. Nothing is written
// before all have accepted a generation. Until then a crash changes nothing, and after that every
// write is one that the next recovery would make too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tiers/store/state_store_impl.h"
#include "tiers/store/store_survey.h"

namespace ziggurat {

class StoreRecovery {
 public:
  /// `survey` has read the file's contents. `notes` has what was found while the file was looked
  /// for.
  StoreRecovery(StateStore::Impl& store, std::unique_ptr<StoreSurvey> survey,
                std::vector<std::string> notes);

  /// Makes the newest generation that may still be whole everywhere the store's state. Errors:
  /// kDataLoss if there is none.
  Task<> choose();
  /// Does StateStore::settle().
  Task<bool> settle(std::vector<RecordDamage> damaged);

 private:
  void adopt(std::uint64_t generation);
  std::string describe(const std::vector<RecordDamage>& damaged) const;
  Task<> begin_epoch();
  void report();
  [[noreturn]] void throw_nothing_left() const;

  StateStore::Impl& store_;
  Quorum& ranks_;
  std::unique_ptr<StoreSurvey> survey_;
  std::vector<std::string> notes_;
  std::vector<std::string> losses_;         ///< generations given up because of this file
  std::uint64_t limit_ = SlotEntry::kNone;  ///< only generations below it are tried
  int native_ = 0;                          ///< errno of the first record that could not be read
};

}  // namespace ziggurat
