// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/call_receiver.h: handles the bytes that the members of a call send:
// place_receiver.h leaves them where they land, sum_receiver.h adds them up. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/exchange/frame.h"

namespace ziggurat {

class ExchangeCall;

class CallReceiver {
 public:
  virtual ~CallReceiver() = default;

  /// Begins the work that needs no other rank.
  virtual void begin() = 0;
  /// Handles the bytes of `place` if they came with the announcement and are all that it sends.
  /// They are not empty, and their checksum was checked.
  virtual void small_arrived(std::size_t place, const wire::FrameHeader& header,
                             std::span<const std::byte> bytes) = 0;
  /// Begins to read the bytes of `place` at `address`, which it lends because they are more than an
  /// announcement carries.
  virtual void read(std::size_t place, std::uint64_t address) = 0;
  /// Returns where to receive the next chunk of `place`, which has the offset and length of
  /// `header`.
  virtual std::span<std::byte> landing(std::size_t place, const wire::FrameHeader& header) = 0;
  virtual void chunk_arrived(std::size_t place, const wire::FrameHeader& header) = 0;
  /// Returns whether all bytes are stored, and no bytes that were read from a lender can have
  /// changed meanwhile.
  virtual bool done() const = 0;
  /// Ends the call, in success or failure: no borrowed memory is used any more.
  virtual void end() {}

  /// Returns how many bytes `place` is to send; landed() returns how many of them have come.
  std::size_t expected(std::size_t place) const { return members_[place].expected; }
  std::size_t landed(std::size_t place) const { return members_[place].landed; }
  /// Notes that the lender `place` says that its bytes were still lent when they had been read.
  void was_kept(std::size_t place) { members_[place].kept = true; }
  bool all_kept() const;

 protected:
  struct Member {
    std::size_t expected = 0;
    std::size_t landed = 0;  // the bytes have come, perhaps unchecked
    std::size_t taken = 0;   // the bytes are checked and stored
    bool is_read = false;    // the bytes are read from the member's memory
    std::uint64_t address = 0;
    bool kept = true;
  };

  CallReceiver(ExchangeCall& call, std::size_t members) : call_(call), members_(members) {}
  /// Reads the bytes of `place` at `address` from now on.
  void begin_reading(std::size_t place, std::uint64_t address);

  ExchangeCall& call_;
  std::vector<Member> members_;  // by place
};

}  // namespace ziggurat
