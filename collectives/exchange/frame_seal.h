// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/frame_seal.h: how a rank checks that frames are what the other rank sent.
//
// Within a host, and if MPI carries the frames, it uses checksums (XXH3), against damage. Between
// hosts of a job that has a secret, it uses tags (AES-256-GMAC), which nobody can make without the
// secret. The tag of a header uses a key of its connection and direction, and the number of the
// frame on it, so a frame that is forged, repeated, left out, moved or sent back is refused. That
// tag also covers the tag of the payload. A payload's tag uses a key of its sender, the same for
// all receivers: workers make and check it. Nothing is encrypted.
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

  /// Makes the mark of a payload. No two payloads of a key may have the same `number`. With
  /// checksums, the same payload at another place of a call gets another tag.
  PayloadMark mark(std::uint64_t number, std::span<const std::byte> payload, const CallKey& key,
                   std::uint64_t offset) const;
  bool matches(const PayloadMark& mark, std::span<const std::byte> payload, const CallKey& key,
               std::uint64_t offset) const;

 private:
  std::optional<SealKey> key_;  // none if checksums are used
};

/// The two keys of a connection, one per direction.
struct ConnectionKeys {
  SealKey send{};
  SealKey receive{};
};

/// Seals the headers that go out on one connection, and checks those that come in, in order.
class HeaderSeal {
 public:
  /// Makes a seal by checksums under `epoch`, which differs between jobs.
  explicit HeaderSeal(std::uint64_t epoch);
  HeaderSeal(std::uint64_t epoch, const std::optional<ConnectionKeys>& keys);
  ~HeaderSeal();
  HeaderSeal(HeaderSeal&&) noexcept;
  HeaderSeal& operator=(HeaderSeal&&) noexcept;

  /// Seals a header that is otherwise complete. It must be the next frame that goes out.
  void seal(FrameHeader& header);
  /// Checks the next header that came in. Errors: kUnavailable if it is damaged, of another job, or
  /// not from the right rank.
  void check(const FrameHeader& header);

 private:
  class Direction;
  std::uint64_t epoch_;
  std::unique_ptr<Direction> out_, in_;  // null if checksums are used
};

}  // namespace ziggurat::wire
