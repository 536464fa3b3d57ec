// SPDX-License-Identifier: Apache-2.0
// core/sharding/reduction.h: how gradients go between ranks: in which type, and how much at once;
// and whether what ranks exchange passes through host memory.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace ziggurat {

/// Buckets of gradients in host memory: one being rounded, one between the ranks, one being taken
/// in; and their size unless told otherwise.
inline constexpr std::uint64_t kReduceBuckets = 3;
inline constexpr std::uint64_t kReduceBucketCount = std::uint64_t{4} << 20;

/// Buffers of gathered parameters in host memory, on their way to a device that ranks cannot reach:
/// one between the ranks, one being copied.
inline constexpr std::uint64_t kStagedGathers = 2;

struct ReductionSettings {
  DType dtype = DType::kBFloat16;  ///< of the values that ranks send, unless they are quantized
  /// Elements of one bucket, all slices together, rounded to whole tiles of each; a bucket ends
  /// with its chunk.
  std::uint64_t bucket_elements = kReduceBucketCount;
  /// The CPU, and so the ranks, cannot reach the device's memory. Buckets are copied from there and
  /// back; parameters are gathered in host memory, in pieces of as many elements.
  bool staged = false;
};

}  // namespace ziggurat
