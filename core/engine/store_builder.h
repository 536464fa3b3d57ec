// SPDX-License-Identifier: Apache-2.0
// core/engine/store_builder.h: a rank's new store, made of any copy of its state: no engine is
// opened, and nothing is in memory but the records under way. Private to core/engine. Reactor's
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
#include "tiers/striped_store.h"

namespace ziggurat {

/// Errors: kInvalidArgument for 8 bits among ranks that divide layers.
void require_undivided_scales(StateFormat format, int tensor_parallel);

class StoreBuilder {
 public:
  struct Request {
    std::string run_identity;
    std::string numerics_fingerprint;
    int slots = 2;
    std::uint64_t blob_bytes_max = 0;
  };
  /// `table` is the rank's. References must outlive this. Errors: StateLoader's; kInvalidArgument
  /// for a blob of more than blob_bytes_max.
  StoreBuilder(Runtime& runtime, StateSource& source, ChunkTable table, Request request);

  const ChunkTable& table() const noexcept { return table_; }
  /// Records that are made at a time within `host_bytes`, each with what is read for it and what it
  /// is converted through.
  static std::size_t records_at_once(const ChunkTable& table, std::uint64_t host_bytes,
                                     const WorkerPool& workers);
  /// What is lost by converting.
  std::vector<std::string> notes() const { return loader_->notes(); }
  /// What its files take, all drives together.
  std::uint64_t file_bytes() const;

  /// With the ranks of `environment`: the files, their space reserved. Errors:
  /// StripedStore::create()'s.
  Task<> create(StripedStore::Environment environment);
  /// Errors: the source's and the drive's.
  Task<> make(ChunkId id);
  /// All records are made: with the other ranks, durable with the source's step and blob.
  Task<> seal();
  /// Its files are closed.
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
