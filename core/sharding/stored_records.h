// SPDX-License-Identifier: Apache-2.0
// core/sharding/stored_records.h: a layout out of a file that nobody vouches for, before anything
// is sized by it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ziggurat {

/// What a store has of records, of one rank.
struct StoredRecords {
  std::size_t count;
  std::uint64_t size_bytes;  ///< of all
};

/// For whoever will call ChunkTable::of_layout(). Errors: kDataLoss where the table would have more
/// chunks, or tiles of elements, than these records can be of; its memory is proportional to both.
void require_records(const std::string& layout, StoredRecords records);

}  // namespace ziggurat
