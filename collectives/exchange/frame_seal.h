// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/frame_seal.h: how a rank knows that frames are what the other rank sent.
//
// Within a host, and where MPI carries the frames: checksums (XXH3), against damage. Between hosts
// of a job that has a secret: tags (AES-256-GMAC), which nobody makes without the secret. A
// header's tag has a key of its connection and direction, and the number of the frame on it, so a
// frame that is forged, repeated, left out, moved or sent back is refused. It covers the tag of the
// payload, which has a key of its sender, one for all who get it: workers make it and check it.
// Nothing is encrypted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "collectives/exchange/frame.h"

namespace ziggurat::wire {

using SealKey = std::array<std::byte, 32>;

/// Seals the payloads of one sender. Any thread.
class PayloadSeal {
 public:
  PayloadSeal() = default;
  explicit PayloadSeal(const std::optional<SealKey>& key) : key_(key) {}

  /// No two payloads of a key have the same `number`. With checksums, the same payload elsewhere
  /// in a call has another tag.
  PayloadMark mark(std::uint64_t number, std::span<const std::byte> payload, const CallKey& key,
                   std::uint64_t offset) const;
  bool matches(const PayloadMark& mark, std::span<const std::byte> payload, const CallKey& key,
               std::uint64_t offset) const;

 private:
  std::optional<SealKey> key_;  // none: checksums
};

/// One key for each direction of a connection.
struct ConnectionKeys {
  SealKey send{};
  SealKey receive{};
};

/// Seals the headers that go out by one connection, and checks those that come in, in order.
class HeaderSeal {
 public:
  /// Checksums under `epoch`, which tells jobs apart.
  explicit HeaderSeal(std::uint64_t epoch);
  HeaderSeal(std::uint64_t epoch, const std::optional<ConnectionKeys>& keys);
  ~HeaderSeal();
  HeaderSeal(HeaderSeal&&) noexcept;
  HeaderSeal& operator=(HeaderSeal&&) noexcept;

  /// The last thing done to it: it is the next frame out.
  void seal(FrameHeader& header);
  /// The next frame in. Errors: kUnavailable for a header that is not whole, not of this job, or
  /// not from its rank.
  void check(const FrameHeader& header);

 private:
  class Direction;
  std::uint64_t epoch_;
  std::unique_ptr<Direction> out_, in_;  // none: checksums
};

}  // namespace ziggurat::wire
