// SPDX-License-Identifier: Apache-2.0
// core/sharding/reduction.h: how ranks exchange gradients: in which type, how much at once, and
// whether what they exchange passes through host memory.
#pragma once

#include <cstdint>
#include <optional>

#include "base/dtype.h"

namespace ziggurat {

/// Number of buckets of gradients in host memory (one is being rounded, one is between the ranks,
/// one is being added up), and their default size in elements.
inline constexpr std::uint64_t kReduceBuckets = 3;
inline constexpr std::uint64_t kReduceBucketCount = std::uint64_t{4} << 20;

/// Number of buffers in host memory for gathered parameters, or whole units of a trainer, on their
/// way to a device that ranks cannot reach: one is between the ranks, one is being copied.
inline constexpr std::uint64_t kStagedGathers = 2;

struct ReductionSettings {
  /// The type of the values that ranks send, unless they are quantized; if not given, each unit's
  /// own.
  std::optional<DType> dtype = std::nullopt;
  /// Elements of one bucket with the slices of all ranks, each rounded to whole tiles. A bucket
  /// ends where its chunk ends.
  std::uint64_t bucket_elements = kReduceBucketCount;
  /// True if the CPU, and so the ranks, cannot reach the device's memory. Buckets are then copied
  /// to host memory and back, and parameters are gathered there in pieces of `bucket_elements`.
  bool staged = false;
  /// What the largest of a trainer's units of whole parameters takes, if they are put together in
  /// host memory for such a device.
  std::uint64_t whole_unit_bytes = 0;
};

}  // namespace ziggurat
