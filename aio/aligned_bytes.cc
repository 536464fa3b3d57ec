// SPDX-License-Identifier: Apache-2.0
// aio/aligned_bytes.cc: memory that nobody has written to yet.
#include "aio/aligned_bytes.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {

AlignedBytes::AlignedBytes(std::uint64_t size_bytes, std::uint64_t lead_bytes)
    : memory_(static_cast<std::byte*>(
                  std::aligned_alloc(kAlignment, round_up(lead_bytes + size_bytes, kAlignment))),
              &std::free),
      lead_(lead_bytes),
      size_(size_bytes) {
  if (memory_) return;
  throw Error(ErrorCode::kResourceExhausted,
              fmt::format("no memory for {} to be moved", format_bytes(size_bytes)));
}

}  // namespace ziggurat
