// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/save_ranks.h: what the ranks of one save tell each other: whether all of them
// go on, and what each wrote. Reactor's thread.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "collectives/communicator.h"

namespace ziggurat {

/// Messages go from rank to rank rather than in a call of all ranks, because a rank that has failed
/// may not enter one.
class SaveRanks {
 public:
  SaveRanks(Reactor& reactor, Communicator& ranks) : reactor_(reactor), ranks_(ranks) {}

  SaveRanks(const SaveRanks&) = delete;
  SaveRanks& operator=(const SaveRanks&) = delete;

  int rank() const noexcept { return ranks_.rank(); }

  /// Returns if no rank has an error. Otherwise every rank throws: its own error, or that of
  /// another rank about `what`. A rank whose error only follows from another rank's reports none,
  /// so that the cause is named. Every rank calls this, whether it has an error or not.
  Task<> agree(std::exception_ptr error, std::string what);
  /// Returns rank 0's name on every rank. It has at most 63 characters.
  Task<std::string> of_first(std::string name);
  /// Returns on rank 0 room for each rank's text of `size_bytes`, and nothing on other ranks.
  /// Throws on every rank if rank 0 has no memory for the texts.
  Task<std::vector<std::string>> room_at_first(std::uint64_t size_bytes, std::string what);
  /// Sends every rank's text into that room. No rank can fail alone between the two calls, so rank
  /// 0 has all texts when it publishes.
  Task<> to_first(const std::string& text, std::vector<std::string>& room);

 private:
  /// Sends `own` to all ranks. `all` gets as many bytes from each rank.
  Task<> exchange(std::span<const std::byte> own, std::span<std::byte> all);

  Reactor& reactor_;
  Communicator& ranks_;
};

}  // namespace ziggurat
