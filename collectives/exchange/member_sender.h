// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/member_sender.h: sends this rank's bytes to one member of a call: with the
// announcement if they are few, otherwise in chunks, or by letting the member read this rank's
// memory. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "collectives/exchange/frame.h"

namespace ziggurat {

class ExchangeCall;

/// Puts chunks in the order of offsets for sending, because workers finish them in any order.
class ChunkOrder {
 public:
  void add(const wire::FrameHeader& header) { ready_.emplace(header.offset, header); }
  /// Returns the next chunk to send, if it is there.
  std::optional<wire::FrameHeader> take();
  /// Returns the bytes of all chunks that were taken.
  std::size_t taken() const noexcept { return next_; }

 private:
  std::map<std::size_t, wire::FrameHeader> ready_;  // by offset
  std::size_t next_ = 0;
};

class MemberSender {
 public:
  MemberSender(ExchangeCall& call, std::size_t place, std::span<const std::byte> bytes)
      : call_(call), place_(place), bytes_(bytes) {}

  /// Returns the bytes that are sent with this rank's announcement: all of them if they are few,
  /// otherwise none.
  std::span<const std::byte> take_small();
  std::uint64_t address() const noexcept { return reinterpret_cast<std::uint64_t>(bytes_.data()); }
  /// Begins to send the rest, because the member has announced the call too. The member gets
  /// chunks, or reads this rank's memory.
  void begin(bool member_reads);
  bool lends() const noexcept { return way_ == Way::kLent; }
  /// Notes that the member has read the memory that was lent. Errors: kUnavailable if none was
  /// lent.
  void was_read();
  bool done() const noexcept { return sent_ == bytes_.size(); }

 private:
  enum class Way {
    kUndecided,  ///< the member has not announced the call yet
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
