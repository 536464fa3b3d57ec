// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/call_receiver.h: what becomes of the bytes that the members of a call send:
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

  /// What needs no other rank.
  virtual void begin() = 0;
  /// All that `place` sends, and it came with the announcement. Not empty, and checked.
  virtual void small_arrived(std::size_t place, const wire::FrameHeader& header,
                             std::span<const std::byte> bytes) = 0;
  /// `place` lends its bytes at `address`; they are more than an announcement carries.
  virtual void read(std::size_t place, std::uint64_t address) = 0;
  /// Where the next chunk of `place` goes, which is of `header`'s offset and length.
  virtual std::span<std::byte> landing(std::size_t place, const wire::FrameHeader& header) = 0;
  virtual void chunk_arrived(std::size_t place, const wire::FrameHeader& header) = 0;
  /// Everything is where it belongs, and nothing that was read may have changed meanwhile.
  virtual bool done() const = 0;
  /// The call has ended, whichever way: nothing borrowed is kept.
  virtual void end() {}

  /// What `place` is to send, and how much of it has come.
  std::size_t expected(std::size_t place) const { return members_[place].expected; }
  std::size_t landed(std::size_t place) const { return members_[place].landed; }
  /// The lender's word that what was read of it was still lent.
  void was_kept(std::size_t place) { members_[place].kept = true; }
  bool all_kept() const;

 protected:
  struct Member {
    std::size_t expected = 0;
    std::size_t landed = 0;  // it lies here, perhaps unchecked
    std::size_t taken = 0;   // it is checked, and where it belongs
    bool is_read = false;    // from its memory
    std::uint64_t address = 0;
    bool kept = true;
  };

  CallReceiver(ExchangeCall& call, std::size_t members) : call_(call), members_(members) {}
  /// From now on the bytes of `place` are read at `address`.
  void begin_reading(std::size_t place, std::uint64_t address);

  ExchangeCall& call_;
  std::vector<Member> members_;  // by place
};

}  // namespace ziggurat
