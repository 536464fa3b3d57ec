// SPDX-License-Identifier: Apache-2.0
// collectives/call.h: a call as every back-end sees it: what all ranks must agree on, and the bytes
// of this rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"

namespace ziggurat {

/// The numbers go over the wire.
enum class CallKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllReduceValues,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kSend,
  kRecv
};
enum class Element : std::uint8_t { kByte, kFloat32, kBFloat16, kFloat16, kFloat64, kUInt64 };

Element element_of(DType dtype) noexcept;
/// The type that sums of `element` have: kFloat32, kBFloat16 or kFloat16.
DType dtype_of(Element element) noexcept;
std::size_t size_bytes(Element element) noexcept;

/// What all ranks must agree on.
struct CallSpec {
  CallKind kind = CallKind::kBarrier;
  Element element = Element::kByte;
  std::uint8_t op = 0;      ///< kAllReduceValues: Communicator::Op
  std::int32_t root = -1;   ///< kBroadcast: a rank of the communicator
  std::uint64_t count = 0;  ///< elements of this rank's slice (kAllReduce: of the whole)

  bool operator==(const CallSpec&) const = default;
  /// Whether a rank may make this call where another makes `other`: a send meets a recv.
  bool meets(const CallSpec& other) const noexcept;
};

/// "all_reduce of 4096 bf16".
std::string describe(const CallSpec& spec);
/// "all_reduce of 12 fp32 (call 5 of ranks 0, 1, 2)".
std::string describe(const CallSpec& spec, std::uint64_t sequence, std::span<const int> members);

/// What one rank calls.
struct Call {
  CallSpec spec;
  std::span<const std::byte> input{};
  std::span<std::byte> output{};  ///< the input itself where a call works in place
  int peer = -1;                  ///< kSend, kRecv: the other rank of the communicator
};

}  // namespace ziggurat
