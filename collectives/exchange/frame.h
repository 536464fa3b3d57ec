// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/frame.h: the frames between two ranks: headers of 112 bytes, each followed
// by a payload or by none.
//
// Ranks of one host may read each other's memory (collectives/exchange/peer_memory.h) and then send
// nothing large. Announcements say where the bytes lie. The reader sends kTaken when it has read
// them, and ends the call when it hears that the bytes were still lent by then (kKept).
//
// A frame that describes a call announces it to every rank of its communicator. Payloads of up to
// kEagerBytes ride on that frame. Larger ones follow in chunks, and only to ranks that have
// announced the same call. So a payload never comes before there is a place for it, in whatever
// order ranks make their communicators' calls, and a call that does not match writes none.
//
// frame_seal.h says who seals headers and payloads, and with what.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "collectives/call.h"

namespace ziggurat::wire {

inline constexpr std::size_t kEagerBytes = 16 * 1024;
inline constexpr std::size_t kChunkBytes = 512 * 1024;  // two chunks and a sum fit an L2 cache
/// Returns the length of the chunk at `offset` of `total` bytes.
constexpr std::size_t chunk_length(std::size_t offset, std::size_t total) noexcept {
  return offset + kChunkBytes < total ? kChunkBytes : total - offset;
}
inline constexpr std::size_t kReasonBytes = 4096;  // longest reason of an abort

enum class FrameKind : std::uint8_t {
  kCall,
  kChunk,
  kReady,  ///< a chunk of results may be read at `address` + offset
  kTaken,  ///< the reader has read the part
  kKept,   ///< the part was lent all the while: results are final
  kAsk,    ///< asks whether the rank is there
  kAlive,  ///< answers kAsk: `count` pieces of work have ended so far (base/runtime/work_ended.h)
  kAbort,
  kBye
};

/// Names a call of a communicator. Lane 0 has the calls of all ranks; each other lane has those of
/// one pair and direction.
struct CallKey {
  std::uint64_t communicator = 0;
  std::uint64_t sequence = 0;
  std::uint64_t lane = 0;

  bool operator==(const CallKey&) const = default;
  auto operator<=>(const CallKey&) const = default;
};

/// Returns the lane on which rank `from` of a communicator of `world_size` sends to `to`.
constexpr std::uint64_t pair_lane(int from, int to, int world_size) noexcept {
  return 1 + static_cast<std::uint64_t>(from) * static_cast<std::uint64_t>(world_size) +
         static_cast<std::uint64_t>(to);
}

/// Returns the rank that sends on a lane of a pair.
constexpr int sender_of(std::uint64_t lane, int world_size) noexcept {
  return static_cast<int>((lane - 1) / static_cast<std::uint64_t>(world_size));
}

using Tag = std::array<std::byte, 16>;

/// Shows whether a payload is what its sender sent.
struct PayloadMark {
  std::uint64_t number = 0;  ///< different for every payload that this rank sends
  Tag tag{};
};

/// A header as it is on the wire: little endian, no padding.
struct FrameHeader {
  std::uint32_t magic = 0;
  std::uint8_t version = 0;
  FrameKind kind = FrameKind::kCall;
  CallKind call = CallKind::kBarrier;
  CallElement element = CallElement::kByte;
  std::uint8_t op = 0;
  std::uint8_t part = 0;   ///< for kAllReduce: 0 contributions, 1 results
  std::uint16_t code = 0;  ///< for kAbort: the ErrorCode
  std::uint32_t from = 0;  ///< rank in the transport
  std::uint64_t lane = 0;
  std::uint64_t communicator = 0;
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;   ///< of this payload within the rank's bytes in the call
  std::uint64_t length = 0;   ///< length of this payload in bytes
  std::uint64_t address = 0;  ///< where lent bytes lie, in kCall and kReady
  PayloadMark payload;
  Tag tag{};  ///< tag of the header's bytes before it

  CallKey key() const noexcept { return {communicator, sequence, lane}; }
  CallSpec spec() const noexcept { return {call, element, op, count}; }
};
static_assert(sizeof(FrameHeader) == 112);

FrameHeader make_header(FrameKind kind, int from, const CallKey& key, const CallSpec& spec);
/// Checks how a header begins. Errors: kUnavailable if it is no frame of this version.
void check_version(const FrameHeader& header);

}  // namespace ziggurat::wire
