// SPDX-License-Identifier: Apache-2.0
// core/sharding/stored_records.h: checks a layout from a file that may be damaged, before memory is
// reserved by its numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ziggurat {

/// Records that a store has of one rank.
struct StoredRecords {
  std::size_t count;
  std::uint64_t size_bytes;  ///< of all
};

/// Checks a layout for a caller who will pass it to ChunkTable::of_layout(), whose memory is
/// proportional to the table's chunks and tiles. Errors: kDataLoss if the table would have more
/// chunks, or more tiles of elements, than these records can hold.
void require_records(const std::string& layout, StoredRecords records);

/// Marks `layout`, which ChunkTable::layout() made, as one of a trainer that lends its parameters:
/// each rank's table is of one rank, over pieces of any shape, which only the trainer can put
/// together. ChunkTable::from_layout() accepts layouts with and without the mark.
std::string layout_of_pieces(const std::string& layout);
bool is_of_pieces(const std::string& layout);

}  // namespace ziggurat
