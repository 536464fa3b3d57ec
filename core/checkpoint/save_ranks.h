// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/save_ranks.h: what the ranks of one save say to each other: whether all of them
// go on, and whom this one waits for meanwhile. Reactor's thread.
#pragma once

#include <cstdint>
#include <exception>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator.h"

namespace ziggurat {

/// Those that a rank has told what it has to say, and not heard of. From rank to rank rather than
/// in a call of all: who waits in one cannot say for whom.
using AwaitedRanks = std::set<int>;

class SaveRanks {
 public:
  /// `awaited`, where it is given, says whom each call below waits for.
  SaveRanks(Reactor& reactor, Communicator& ranks, AwaitedRanks* awaited)
      : reactor_(reactor), ranks_(ranks), awaited_(awaited != nullptr ? *awaited : own_awaited_) {}

  SaveRanks(const SaveRanks&) = delete;
  SaveRanks& operator=(const SaveRanks&) = delete;

  int rank() const noexcept { return ranks_.rank(); }

  /// All ranks go on, or each throws: what it met itself, or what another did, of `what`. Who only
  /// followed another leaves the word to that one. Every rank calls it, whatever it met.
  Task<> agree(std::exception_ptr error, std::string what);
  /// Rank 0's, on all. At most 63 characters.
  Task<std::string> of_first(std::string name);
  /// On rank 0 room for each rank's text of `size_bytes`; nothing on others. Errors: on every rank,
  /// where rank 0 has no memory for them.
  Task<std::vector<std::string>> room_at_first(std::uint64_t size_bytes, std::string what);
  /// Every rank's text to that room. What comes after is rank 0's, and no error of one rank alone
  /// keeps it from beginning.
  Task<> to_first(const std::string& text, std::vector<std::string>& room);

 private:
  /// `all` has room for as many bytes of each rank.
  Task<> exchange(std::span<const std::byte> own, std::span<std::byte> all);
  Task<> hear(int rank, std::span<std::byte> its);

  Reactor& reactor_;
  Communicator& ranks_;
  AwaitedRanks own_awaited_;
  AwaitedRanks& awaited_;
};

}  // namespace ziggurat
