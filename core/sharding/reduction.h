// SPDX-License-Identifier: Apache-2.0
// core/sharding/reduction.h: how gradients go between ranks: in which type, and how much at once.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace ziggurat {

/// Buckets of gradients in host memory: one being rounded, one between the ranks, one being taken
/// in; and their size unless told otherwise.
inline constexpr std::uint64_t kReduceBuckets = 3;
inline constexpr std::uint64_t kReduceBucketCount = std::uint64_t{4} << 20;

struct ReductionSettings {
  DType dtype = DType::kBFloat16;  ///< of the values that ranks send, unless they are quantized
  /// Elements of one bucket, all slices together, rounded to whole tiles of each; a bucket ends
  /// with its chunk.
  std::uint64_t bucket_elements = kReduceBucketCount;
};

}  // namespace ziggurat
