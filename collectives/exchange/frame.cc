// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/frame.cc: makes headers and recognizes them.
#include "collectives/exchange/frame.h"

#include <fmt/format.h>

#include <bit>

#include "base/error.h"

namespace ziggurat::wire {
namespace {

constexpr std::uint32_t kMagic = 0x5a474652;  // "ZGFR"
constexpr std::uint8_t kVersion = 3;
static_assert(std::endian::native == std::endian::little, "headers go out as they are in memory");

}  // namespace

FrameHeader make_header(FrameKind kind, int from, const CallKey& key, const CallSpec& spec) {
  FrameHeader header;
  header.magic = kMagic;
  header.version = kVersion;
  header.kind = kind;
  header.call = spec.kind;
  header.element = spec.element;
  header.op = spec.op;
  header.count = spec.count;
  header.from = static_cast<std::uint32_t>(from);
  header.communicator = key.communicator;
  header.sequence = key.sequence;
  header.lane = key.lane;
  return header;
}

void check_version(const FrameHeader& header) {
  if (header.magic == kMagic && header.version == kVersion) return;
  throw Error(
      ErrorCode::kUnavailable,
      fmt::format(
          "sent a frame that begins with {:#x} and version {}, but this build needs version {}; "
          "start all ranks from one build",
          header.magic, header.version, kVersion));
}

}  // namespace ziggurat::wire
