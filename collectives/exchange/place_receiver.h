// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/place_receiver.h: receives bytes of members that stay where they land.
#pragma once

#include <span>
#include <vector>

#include "collectives/exchange/call_receiver.h"

namespace ziggurat {

class PlaceReceiver final : public CallReceiver {
 public:
  /// Receives `part` of the call into `in`, by place. `own` is copied to this rank's own place in
  /// `in`.
  PlaceReceiver(ExchangeCall& call, std::uint8_t part, std::vector<std::span<std::byte>> in,
                std::span<const std::byte> own);

  void begin() override;
  void small_arrived(std::size_t place, const wire::FrameHeader& header,
                     std::span<const std::byte> bytes) override;
  void read(std::size_t place, std::uint64_t address) override;
  std::span<std::byte> landing(std::size_t place, const wire::FrameHeader& header) override;
  void chunk_arrived(std::size_t place, const wire::FrameHeader& header) override;
  bool done() const override;

  /// Reads one chunk that `place` has just lent; chunks are lent in order.
  void read_chunk(std::size_t place, const wire::FrameHeader& header);
  bool taken(std::size_t place) const { return members_[place].taken == members_[place].expected; }

 private:
  struct Reading {
    std::size_t begun = 0;
    std::size_t in_flight = 0;  // chunks
  };
  void read_ahead(std::size_t place);

  std::uint8_t part_;
  std::vector<std::span<std::byte>> in_;
  std::vector<Reading> readings_;  // by place
  std::span<const std::byte> own_;
  bool copied_ = false;
};

}  // namespace ziggurat
