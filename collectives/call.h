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

/// The kind of a call. The numbers go over the wire.
enum class CallKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllReduceValues,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv
};
enum class CallElement : std::uint8_t { kByte, kFloat32, kBFloat16, kFloat16, kFloat64, kUInt64 };

/// Returns a kind in words: "all_reduce".
const char* name_of(CallKind kind) noexcept;

CallElement element_of(DType dtype) noexcept;
/// Returns the type that sums of `element` have: kFloat32, kBFloat16 or kFloat16.
DType dtype_of(CallElement element) noexcept;
std::size_t size_bytes(CallElement element) noexcept;

/// The facts about a call that must be equal on all ranks.
struct CallSpec {
  CallKind kind = CallKind::kBarrier;
  CallElement element = CallElement::kByte;
  std::uint8_t op = 0;      ///< kAllReduceValues: Communicator::Op
  std::uint64_t count = 0;  ///< elements of this rank's slice (for kAllReduce, of the whole)

  bool operator==(const CallSpec&) const = default;
  /// Returns whether a rank may make this call while another makes `other`. They are equal, except
  /// that a send meets a recv.
  bool meets(const CallSpec& other) const noexcept;
};

/// Formats a call: "all_reduce of 4096 bf16".
std::string describe(const CallSpec& spec);
/// Formats a call with its number and ranks: "all_reduce of 12 fp32 (call 5 of ranks 0, 1, 2)".
std::string describe(const CallSpec& spec, std::uint64_t sequence, std::span<const int> members);

/// A call of one rank.
struct Call {
  CallSpec spec;
  std::span<const std::byte> input{};
  std::span<std::byte> output{};  ///< the input itself if a call works in place
  int peer = -1;                  ///< for kSend and kRecv: the other rank of the communicator
};

}  // namespace ziggurat
