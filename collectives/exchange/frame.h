// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/frame.h: what goes over a channel between two ranks: headers of 120 bytes,
// each with a payload behind it or none.
//
// Between ranks of one host that may read each other's memory (collectives/exchange/peer_memory.h)
// nothing large is sent at all: announcements say where it lies, who reads it says when it has
// (kTaken), and ends the call when it hears that the bytes were still lent by then (kKept).
//
// A call is announced to every rank of its communicator by a frame that describes it. Payloads of
// up to kEagerBytes ride on that frame. Larger ones follow in chunks, and only to ranks that have
// announced the same call: so no payload ever comes before there is a place for it, whatever the
// order in which ranks come to their communicators' calls, and none is written by a call that does
// not match.
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
inline constexpr std::size_t kChunkBytes = 512 * 1024;  // two of them and a sum fit an L2
/// The length of the chunk at `offset` of `total` bytes.
constexpr std::size_t chunk_length(std::size_t offset, std::size_t total) noexcept {
  return offset + kChunkBytes < total ? kChunkBytes : total - offset;
}
inline constexpr std::size_t kReasonBytes = 4096;  // of an abort

enum class FrameKind : std::uint8_t {
  kCall,
  kChunk,
  kReady,  ///< a chunk of results that may be read at `address` + offset
  kTaken,  ///< the part is read
  kKept,   ///< the part was whole all the while: results are final
  kAsk,    ///< are you there?
  kAlive,  ///< the answer: `count` pieces of work have ended so far (base/runtime/work_ended.h)
  kAbort,
  kBye
};

/// Which call of which communicator. Lane 0 has the calls of all ranks, the others have one pair
/// and direction each.
struct CallKey {
  std::uint64_t communicator = 0;
  std::uint64_t sequence = 0;
  std::uint64_t lane = 0;

  bool operator==(const CallKey&) const = default;
  auto operator<=>(const CallKey&) const = default;
};

/// The lane of what rank `from` of a communicator of `world_size` sends `to`.
constexpr std::uint64_t pair_lane(int from, int to, int world_size) noexcept {
  return 1 + static_cast<std::uint64_t>(from) * static_cast<std::uint64_t>(world_size) +
         static_cast<std::uint64_t>(to);
}

/// Who sends on a lane of a pair.
constexpr int sender_of(std::uint64_t lane, int world_size) noexcept {
  return static_cast<int>((lane - 1) / static_cast<std::uint64_t>(world_size));
}

using Tag = std::array<std::byte, 16>;

/// Tells whether a payload is what its sender sent.
struct PayloadMark {
  std::uint64_t number = 0;  ///< of all payloads that this rank sends; no two have the same
  Tag tag{};
};

/// As it is on the wire: little endian, no padding.
struct FrameHeader {
  std::uint32_t magic = 0;
  std::uint8_t version = 0;
  FrameKind kind = FrameKind::kCall;
  CallKind call = CallKind::kBarrier;
  CallElement element = CallElement::kByte;
  std::uint8_t op = 0;
  std::uint8_t part = 0;   ///< kAllReduce: 0 contributions, 1 results
  std::uint16_t code = 0;  ///< kAbort: the ErrorCode
  std::int32_t root = -1;
  std::uint32_t from = 0;  ///< rank of the transport
  std::uint32_t unused = 0;
  std::uint64_t lane = 0;
  std::uint64_t communicator = 0;
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;   ///< of this payload in what the rank sends in the call
  std::uint64_t length = 0;   ///< of this payload, bytes
  std::uint64_t address = 0;  ///< of what it lends, kCall and kReady
  PayloadMark payload;
  Tag tag{};  ///< of the bytes before it

  CallKey key() const noexcept { return {communicator, sequence, lane}; }
  CallSpec spec() const noexcept { return {call, element, op, root, count}; }
};
static_assert(sizeof(FrameHeader) == 120);

FrameHeader make_header(FrameKind kind, int from, const CallKey& key, const CallSpec& spec);
/// Errors: kUnavailable for what does not begin as a frame of this version.
void check_version(const FrameHeader& header);

}  // namespace ziggurat::wire
