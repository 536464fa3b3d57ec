// SPDX-License-Identifier: Apache-2.0
// aio/drive_cap.h: how many bytes must be at a drive at once to keep it busy, found by measuring.
//
// For whoever sets up a DriveQueue: more than this only makes urgent transfers wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aio/direct_file.h"
#include "aio/io_engine.h"
#include "base/runtime/async.h"

namespace ziggurat {

struct DriveCapSearch {
  IoKind kind = IoKind::kRead;     ///< or kWrite
  std::uint64_t range_bytes = 0;   ///< of the file, from its start: measured over, round and round
  std::uint64_t sample_bytes = 0;  ///< moved for one sample
  int rounds = 3;                  ///< samples of each cap; their median counts
  double tolerance = 0.02;         ///< of the best throughput that may be given up
};

struct DriveCap {
  struct Sample {
    std::uint64_t outstanding_bytes;
    double bytes_per_second;
  };
  std::uint64_t outstanding_bytes = 0;  ///< the smallest within the tolerance
  double bytes_per_second = 0;          ///< there
  std::vector<Sample> samples;          ///< of each cap that was tried, ascending: for reports
};

/// Keeps 1, 2, 4, ... blocks of DirectFile::kBlockBytes in flight, up to those that `memory` holds.
/// By the reactor's clock. `file` is filled over the range, or its reads are faster than any drive;
/// a write search overwrites it with what is in `memory`. Nothing else uses the drive meanwhile.
/// Errors: those of the transfers; kInvalidArgument if memory or range hold no block.
Task<DriveCap> find_drive_cap(Reactor& reactor, DirectFile& file, std::span<std::byte> memory,
                              DriveCapSearch search);

}  // namespace ziggurat
