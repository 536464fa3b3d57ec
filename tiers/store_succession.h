// SPDX-License-Identifier: Apache-2.0
// tiers/store_succession.h: a store that takes the place of another in the same directories, so
// that whenever the machine dies one of the two is there whole.
//
//   DIR/rank00000.ziggurat ..            the old store
//   DIR/resharded/rank00000.ziggurat ..  the new one, built like any other
//   DIR/resharded/decided                it is whole: its files' names, of all directories
//
// Without a note in any directory the old store stands, and what was built is removed. Once there
// is one, whoever comes next goes on: the new files are renamed into DIR, then what is left of the
// old store is removed, then the notes. Each part can be done again. One process at a time calls
// this; the old files' locks keep others away until the note is there. Reactor's thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "aio/direct_file.h"
#include "tiers/striping.h"

namespace ziggurat {

/// The name of a file of some rank of a store: "rank00000.ziggurat".
bool is_store_file(const std::string& name);

class StoreSuccession {
 public:
  static constexpr std::string_view kFolder = "resharded";
  static constexpr std::string_view kNote = "decided";
  static std::string folder_in(const std::string& directory);

  StoreSuccession(Reactor& reactor, std::vector<StripePlace> places)
      : reactor_(reactor), places_(std::move(places)) {}

  /// Ends what an earlier process left: forward where it had decided, back where it had not.
  /// Errors: kUnavailable while another process builds; kDataLoss for a note that makes no sense,
  /// or a file that it names and that is nowhere: nothing of the old store is removed then.
  Task<> recover();

  using Names = std::vector<std::string>;
  /// The files of a store that is to take the other's place, and may have done so in part; none: it
  /// is not decided, or done. Errors: kDataLoss for a note that makes no sense.
  Task<std::optional<Names>> decided() const;
  /// Where a file of a decided store is in a place: in the folder until it is renamed.
  static std::string place_of(const StripePlace& place, const std::string& name);

  /// The places by index in the order in which the old store's stripes lie in them, so that each
  /// stripe of the new one lies where the old one's does; those without one come last.
  std::vector<std::size_t> order() const;
  /// Nobody opens the old store from here on. Errors: kUnavailable where it is in use.
  void lock_old();
  /// The new store is whole and durable in folder_in() of each place. Errors: errno's; before the
  /// first note is durable the old store stands, after it recover() goes on.
  Task<> complete();

 private:
  bool left_behind() const;
  std::vector<std::string> names_in(const StripePlace& place, const std::string& directory) const;
  Names new_names() const;
  Task<> move(Names names);
  void require_all(const Names& names) const;
  void remove_rest() const;

  Reactor& reactor_;
  std::vector<StripePlace> places_;
  std::vector<std::unique_ptr<DirectFile>> old_;  // locked
};

}  // namespace ziggurat
