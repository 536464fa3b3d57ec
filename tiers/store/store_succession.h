// SPDX-License-Identifier: Apache-2.0
// tiers/store/store_succession.h: lets a store take the place of another one in the same
// directories, so that one of the two is always whole, whenever the machine dies.
//
//   DIR/rank00000.ziggurat ..            the old store
//   DIR/resharded/rank00000.ziggurat ..  the new one, built like any other
//   DIR/resharded/decided                the note that it is whole: the names of all its files
//
// If no directory has a note, the old store is kept, and what was built is removed. Once there is a
// note, every later process continues: it renames the new files into DIR, then removes what is left
// of the old store, then the notes. Each part can be done again. Only one process at a time calls
// this: the locks of the old files keep others away until the note is there. Reactor's thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "aio/direct_file.h"
#include "tiers/store/striping.h"

namespace ziggurat {

class StoreSuccession {
 public:
  static constexpr std::string_view kFolder = "resharded";
  static constexpr std::string_view kNote = "decided";
  static std::string folder_in(const std::string& directory);

  StoreSuccession(Reactor& reactor, std::vector<StripePlace> places)
      : reactor_(reactor), places_(std::move(places)) {}

  /// Finishes what an earlier process left: first the creation of a store whose ranks did not all
  /// give it its name (store_files.h); then goes forward if it had decided, and back if it had not.
  /// Errors: kUnavailable while another process builds; kDataLoss for a note that makes no sense,
  /// or for a file that the note names and that does not exist: then nothing of the old store is
  /// removed.
  Task<> recover();
  /// Returns what recover() says to the trainer.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  using Names = std::vector<std::string>;
  /// Returns the files of a store that is to take the other's place, and may have done so in part;
  /// none if nothing was decided, or all is done. Errors: kDataLoss for a note that makes no sense.
  Task<std::optional<Names>> decided() const;
  /// Returns where a file of a decided store is in a place: in the folder until it is renamed.
  static std::string place_of(const StripePlace& place, const std::string& name);

  /// Returns the indices of the places in the order of the old store's stripes in them, so that
  /// each stripe of the new store lies where the old one's does. Places without a stripe come last.
  std::vector<std::size_t> order() const;
  /// Locks the old store, so that nobody opens it from here on. Errors: kUnavailable if it is in
  /// use.
  void lock_old();
  /// Puts the new store, which is whole and durable in folder_in() of each place, in the old one's
  /// place. Errors: errno's. Before the first note is durable the old store is kept; after that
  /// recover() continues.
  Task<> complete();

 private:
  bool left_behind() const;
  std::vector<std::unique_ptr<DirectFile>> locked(bool built) const;
  std::vector<std::string> names_in(const StripePlace& place, const std::string& directory) const;
  Names new_names() const;
  Task<> move(Names names);
  void require_all(const Names& names) const;
  void remove_built() const;
  void remove_folders() const;

  Reactor& reactor_;
  std::vector<StripePlace> places_;
  std::vector<std::unique_ptr<DirectFile>> old_;  // locked
  std::vector<std::string> notes_;
};

}  // namespace ziggurat
