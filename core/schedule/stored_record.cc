// SPDX-License-Identifier: Apache-2.0
// core/schedule/stored_record.cc: reads records, hashes them and compares the hashes.
#include "core/schedule/stored_record.h"

#include "tiers/store/record_hash.h"

namespace ziggurat {

namespace {

/// Hashes a record. `found` is what the job finds if all is well.
Task<std::uint64_t> hashed(Context& context, ChunkId chunk, std::span<const std::byte> record,
                           StateStore::Expected found, Workers::Turn turn) {
  const std::function<void()> job = [&] {
    found.hash = record_hash(record, found.seed, context.table.record_format(chunk));
  };
  const Work work{.name = "hash record", .bytes = record.size(), .read = record};
  co_await context.run_near(chunk, work, job, turn);
  co_return found.hash;
}

Task<bool> is_as_expected(Context& context, ChunkId chunk, StateStore::Expected expected,
                          std::span<const std::byte> record, Workers::Turn turn) {
  const std::uint64_t hash = co_await hashed(context, chunk, record, expected, turn);
  co_return hash == expected.hash;
}

}  // namespace

Task<std::uint64_t> hash_record(Context& context, ChunkId chunk, std::span<const std::byte> record,
                                std::uint64_t seed) {
  const StateStore::Expected any{.seed = seed, .hash = 0};
  return hashed(context, chunk, record, any, Workers::Turn::kInOrder);
}

Task<bool> is_record_of(Context& context, const StripedStore& store, ChunkId chunk,
                        std::uint64_t generation, std::span<const std::byte> record) {
  co_return co_await is_as_expected(context, chunk, store.expected(chunk, generation), record,
                                    Workers::Turn::kInOrder);
}

Task<> require_record_of(Context& context, const StripedStore& store, ChunkId chunk,
                         std::uint64_t generation, std::span<const std::byte> record) {
  const bool right = co_await is_record_of(context, store, chunk, generation, record);
  if (!right) throw store.corrupt_record(chunk, generation);
}

Task<> read_record(Context& context, StripedStore& store, ChunkId chunk, std::uint64_t generation,
                   std::span<std::byte> record, Workers::Turn turn) {
  // The expected hash is asked for before the read. During the read later generations may be
  // sealed, and then a constant record would count as one of theirs.
  const StateStore::Expected expected = store.expected(chunk, generation);
  co_await store.read(chunk, generation, record);
  const bool right = co_await is_as_expected(context, chunk, expected, record, turn);
  if (!right) throw store.corrupt_record(chunk, generation);
}

}  // namespace ziggurat
