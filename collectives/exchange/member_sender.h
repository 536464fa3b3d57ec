// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/member_sender.h: what one member of a call gets of this rank's bytes: with
// the announcement if they are few, else in chunks, or by reading this rank's memory. Reactor's
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "collectives/exchange/frame.h"

namespace ziggurat {

class ExchangeCall;

/// Workers finish chunks in any order; they are sent in the order of offsets.
class ChunkOrder {
 public:
  void add(const wire::FrameHeader& header) { ready_.emplace(header.offset, header); }
  /// The next to be sent, if it is there.
  std::optional<wire::FrameHeader> take();
  /// Bytes of all that was taken.
  std::size_t taken() const noexcept { return next_; }

 private:
  std::map<std::size_t, wire::FrameHeader> ready_;  // by offset
  std::size_t next_ = 0;
};

class MemberSender {
 public:
  MemberSender(ExchangeCall& call, std::size_t place, std::span<const std::byte> bytes)
      : call_(call), place_(place), bytes_(bytes) {}

  /// What rides on this rank's announcement, and is sent with it: all, if it is little.
  std::span<const std::byte> take_small();
  std::uint64_t address() const noexcept { return reinterpret_cast<std::uint64_t>(bytes_.data()); }
  /// The member has announced the call too; it gets the rest in chunks, or reads it here.
  void begin(bool member_reads);
  bool lends() const noexcept { return way_ == Way::kLent; }
  /// It has read what it was lent. Errors: kUnavailable if it was lent nothing.
  void was_read();
  bool done() const noexcept { return sent_ == bytes_.size(); }

 private:
  enum class Way {
    kUndecided,  ///< the member has not announced the call
    kChunks,
    kLent
  };
  void send_chunks();
  void mark_chunk(std::size_t offset, std::size_t length);
  void send_marked();

  ExchangeCall& call_;
  std::size_t place_;
  std::span<const std::byte> bytes_;
  Way way_ = Way::kUndecided;
  ChunkOrder marked_;
  std::size_t begun_ = 0, sent_ = 0;
  std::size_t in_flight_ = 0;  // chunks
};

}  // namespace ziggurat
