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

/// `layout`, ChunkTable's, for the store of a trainer that lends: its ranks' tables are each of one
/// rank, over pieces of any shape, which the trainer alone puts together. from_layout() takes both.
std::string layout_of_pieces(const std::string& layout);
bool is_of_pieces(const std::string& layout);

}  // namespace ziggurat
