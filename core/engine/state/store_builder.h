// SPDX-License-Identifier: Apache-2.0
// core/engine/state/store_builder.h: makes a rank's new store from any copy of its state. No engine
// is opened, and only the records under way are in memory. Private to core/engine. Reactor's
// thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/aligned_bytes.h"
#include "core/checkpoint/state_loader.h"
#include "core/engine/runtime.h"
#include "core/sharding/chunk_table.h"
#include "tiers/store/striped_store.h"

namespace ziggurat {

/// Throws kInvalidArgument if a state of 8 bits is used among ranks that divide layers.
void require_undivided_scales(StateFormat format, int tensor_parallel);

class StoreBuilder {
 public:
  struct Request {
    std::string run_identity;
    std::string numerics_fingerprint;
    int slots = 2;
    std::uint64_t blob_bytes_max = 0;
  };
  /// Prepares the store; `table` is the rank's chunk table. References must outlive this object.
  /// Errors: StateLoader's; kInvalidArgument for a blob of more than blob_bytes_max.
  StoreBuilder(Runtime& runtime, StateSource& source, ChunkTable table, Request request);

  const ChunkTable& table() const noexcept { return table_; }
  /// Returns how many records are made at a time within `host_bytes`. Each needs memory for what is
  /// read for it and for its conversion too.
  static std::size_t records_at_once(const ChunkTable& table, std::uint64_t host_bytes,
                                     const Workers& workers);
  /// Describes what is lost by converting.
  std::vector<std::string> notes() const { return loader_->notes(); }
  /// Returns the size of the store's files, all drives together.
  std::uint64_t file_bytes() const;

  /// Makes the files and reserves their space, together with the ranks of `environment`. Errors:
  /// StripedStore::create()'s.
  Task<> create(StripedStore::Environment environment);
  /// Makes the record of one chunk. Errors: the source's and the drive's.
  Task<> make(ChunkId id);
  /// Makes the store durable with the source's step and blob, together with the other ranks, when
  /// all records are made.
  Task<> seal();
  /// Closes the store's files.
  void close() { store_.reset(); }

 private:
  StoreSpec spec() const;

  Runtime& runtime_;
  StateSource& source_;
  ChunkTable table_;
  Request request_;
  std::unique_ptr<StateLoader> loader_;
  std::unique_ptr<StripedStore> store_;
  AlignedPool memory_;
};

}  // namespace ziggurat
