// SPDX-License-Identifier: Apache-2.0
// core/engine/state/store_builder.cc: makes the store record by record.
#include "core/engine/state/store_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "aio/aligned_bytes.h"
#include "base/error.h"
#include "core/checkpoint/blob_header.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {

void require_undivided_scales(StateFormat format, int tensor_parallel) {
  if (!has_codes(format) || tensor_parallel == 1) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("`state_format=8bit` cannot be used with `tp={}`: a block's scale covers "
                          "divided and undivided parameters together, so those that every rank has "
                          "whole would drift apart; choose another `state_format`",
                          tensor_parallel));
}

StoreBuilder::StoreBuilder(Runtime& runtime, StateSource& source, ChunkTable table, Request request)
    : runtime_(runtime),
      source_(source),
      table_(std::move(table)),
      request_(std::move(request)),
      loader_(std::make_unique<StateLoader>(runtime.reactor, runtime.jobs(), table_, source,
                                            LoadOptions{}, /*initial_accumulator=*/0)) {
  const std::size_t size_bytes = source.content().blob.size();
  if (size_bytes <= request_.blob_bytes_max) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: the trainer's blob has {} bytes, but the new store has room for only {}",
                  source.place(), size_bytes, request_.blob_bytes_max));
}

std::size_t StoreBuilder::records_at_once(const ChunkTable& table, std::uint64_t host_bytes,
                                          const Workers& workers) {
  constexpr std::size_t kBesideWorkers = 16;  // records that are being read or written
  constexpr std::uint64_t kMemoryPerRecord = 4;
  const std::uint64_t fit =
      host_bytes / (kMemoryPerRecord * std::max<std::uint64_t>(1, table.largest_record_bytes()));
  return std::clamp<std::size_t>(fit, 1, kBesideWorkers + workers.threads());
}

StoreSpec StoreBuilder::spec() const {
  return {.layout = table_.layout(),
          .run_identity = request_.run_identity,
          .numerics_fingerprint = request_.numerics_fingerprint,
          .record_bytes = table_.record_bytes(),
          .constant = table_.constant_chunks(),
          .record_format = table_.record_format(),
          .slots = static_cast<std::uint32_t>(request_.slots),
          .blob_capacity_bytes = kBlobHeadBytes + request_.blob_bytes_max};
}

std::uint64_t StoreBuilder::file_bytes() const { return StateStore::file_bytes(spec()); }

Task<> StoreBuilder::create(StripedStore::Environment environment) {
  Task<std::unique_ptr<StripedStore>> creating =
      StripedStore::create(std::move(environment), spec());
  store_ = co_await std::move(creating);
}

Task<> StoreBuilder::make(ChunkId id) {
  const AlignedBytes record = memory_.take(table_.chunk(id).record_bytes());
  co_await loader_->load(id, record.span());
  const std::uint64_t seed = store_->write_seed(id, 0);
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] {
    hash = record_hash(record.span(), seed, table_.record_format(id));
  };
  co_await runtime_.jobs().run(runtime_.reactor, {"hash record", record.span().size()}, job);
  co_await store_->write(id, 0, record.span(), hash);
}

Task<> StoreBuilder::seal() {
  const StateContent& its = source_.content();
  std::optional<BlobLine> line;
  if (its.line) line = continued(*its.line);
  const std::vector<std::byte> blob = wrap_blob(loader_->step(), line, its.blob);
  co_await store_->commit(0, blob, {});
}

}  // namespace ziggurat
