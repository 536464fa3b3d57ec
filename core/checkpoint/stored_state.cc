// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/stored_state.cc: finds which record of which rank has an element, and proves it.
#include "core/checkpoint/stored_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "core/checkpoint/blob_header.h"
#include "core/checkpoint/shard_plan.h"
#include "core/sharding/stored_records.h"
#include "core/sharding/tensor_part.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

/// Returns which part of the state a rank of the store has. Stages 1 to 3 hold the same.
SavingRank saving_rank(const ChunkTable& table, int rank) {
  const Sharding& ranks = table.sharding();
  return {.rank = rank,
          .ranks = ranks.ranks(),
          .replica = rank / ranks.tensor.ranks / ranks.world_size};
}

/// Returns true also for stores that were made before layouts were marked: they have several ranks,
/// and each of them has the layout of one.
bool is_of_pieces(const std::string& layout, int ranks) {
  return ziggurat::is_of_pieces(layout) ||
         (ranks > 1 && ChunkTable::sharding_of(layout).ranks() == 1);
}

std::string ranks_text(int ranks) { return ranks == 1 ? "rank" : fmt::format("{} ranks", ranks); }

}  // namespace

Task<std::unique_ptr<StoredState>> StoredState::open(Reactor& reactor, Workers& workers,
                                                     std::vector<StripePlace> places) {
  std::unique_ptr<StoredState> state(new StoredState(reactor, workers));
  for (const StripePlace& place : places)
    state->place_ += (state->place_.empty() ? "" : ",") + place.directory;
  Task<std::unique_ptr<StoreReader>> opening = StoreReader::open(reactor, std::move(places));
  state->reader_ = co_await std::move(opening);
  state->describe();
  co_return std::move(state);
}

void StoredState::describe() {
  const StoreState& stored = reader_->state();
  try {
    of_pieces_ = is_of_pieces(stored.layout, reader_->ranks());
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", place_, error.what()));
  }
  read_tables();
  const Sharding& ranks = tables_.front().sharding();
  content_ = {.model = tables_.front().model().name,
              .dtype = tables_.front().model().dtype,
              .state = tables_.front().state(),
              .rounding = tables_.front().rounding(),
              .units = {},
              .tensors = {},
              .step = 0,
              .blob = {},
              .run_identity = stored.run_identity,
              .numerics_fingerprint = stored.numerics_fingerprint,
              .layout = {.ranks = reader_->ranks(),
                         .tensor_parallel = ranks.tensor.ranks,
                         .zero_stage = ranks.stage,
                         .shard_group = ranks.world_size,
                         .placement = "store"},
              .resume = {},
              .versions = {}};
  if (const auto its = unwrap_blob(stored.blob)) {
    content_.step = its->generation;
    content_.blob.assign(its->blob.begin(), its->blob.end());
    content_.line = line_of(its->line, {stored.uuid.high, stored.uuid.low}, stored.epoch);
  }
  describe_tensors();
  stretches_.resize(content_.tensors.size());
  for (int rank = 0; rank < reader_->ranks(); ++rank) add_stretches(rank);
  for (std::vector<Stretch>& of : stretches_) std::ranges::sort(of, {}, &Stretch::first);
}

/// Reads each rank's table from its layout, and checks that its records match.
void StoredState::read_tables() {
  for (int rank = 0; rank < reader_->ranks(); ++rank) {
    StoredRecords records{.count = reader_->chunk_count(rank), .size_bytes = 0};
    for (ChunkId id = 0; id < records.count; ++id)
      records.size_bytes += reader_->record_bytes(rank, id);
    const std::string& layout = of_pieces_ ? reader_->layout(rank) : this->layout();
    try {
      require_records(layout, records);
      tables_.push_back(ChunkTable::of_layout(layout, of_pieces_ ? 0 : rank));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}: {}", place_, error.what()));
    }
    const std::vector<std::uint64_t> sizes = tables_.back().record_bytes();
    bool same = sizes.size() == reader_->chunk_count(rank) &&
                tables_.back().sharding().ranks() == (of_pieces_ ? 1 : reader_->ranks());
    for (ChunkId id = 0; same && id < sizes.size(); ++id)
      same = sizes[id] == reader_->record_bytes(rank, id);
    if (!same) {
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format("{}: rank {} has {} records, which do not match the {} records of its layout",
                      place_, rank, reader_->chunk_count(rank), tables_.back().chunks().size()));
    }
  }
}

/// Describes the tensors of one model, or every rank's own.
void StoredState::describe_tensors() {
  const std::size_t models = of_pieces_ ? tables_.size() : 1;
  std::set<std::string> owners;
  for (std::size_t rank = 0; rank < models; ++rank) {
    const ChunkRuns runs(tables_[rank]);
    first_tensors_.push_back(content_.tensors.size());
    const std::vector<StateUnit> units = runs.units();
    const bool again = std::ranges::any_of(units, [&](const StateUnit& unit) {
      const auto is_known = [&](const std::string& name) { return owners.contains(name); };
      return is_known(unit.name) || std::ranges::any_of(unit.params, is_known);
    });
    const auto named = [&](const std::string& name) {
      return again ? fmt::format("rank{}/{}", rank, name) : name;
    };
    for (StateUnit unit : units) {
      owners.insert(unit.name);
      owners.insert(unit.params.begin(), unit.params.end());
      unit.name = named(unit.name);
      for (std::string& param : unit.params) param = named(param);
      content_.units.push_back(std::move(unit));
    }
    for (StateTensor tensor : runs.tensors()) {
      const bool master = tensor.name == tensor.owner;
      tensor.owner = named(tensor.owner);
      tensor.name = master ? tensor.owner : state_tensor_name(tensor.array, tensor.owner);
      content_.tensors.push_back(std::move(tensor));
    }
  }
}

/// Adds where a rank's chunks have the tensors' elements. What several ranks hold is read from the
/// rank that would write it to a checkpoint.
void StoredState::add_stretches(int rank) {
  const ChunkTable& table = tables_[static_cast<std::size_t>(rank)];
  const ChunkRuns runs(table);
  const WrittenChunks written(table, saving_rank(table, of_pieces_ ? 0 : rank));
  const std::size_t first = first_tensors_[of_pieces_ ? static_cast<std::size_t>(rank) : 0];
  std::map<std::string, bool> divided;
  for (const UnitSpec& unit : table.model().units) {
    for (const ParamSpec& param : unit.params) divided[param.name] = written.writes(param);
  }
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    if (!written.writes(id)) continue;
    for (const ChunkRuns::OfTensor& of : runs.of(id)) {
      const auto whose = divided.find(runs.tensors()[of.tensor].owner);
      if (whose != divided.end() && !whose->second) continue;
      for (const TensorRun& run : of.runs)
        stretches_[first + of.tensor].push_back({.first = run.first,
                                                 .count = run.count,
                                                 .at = run.at,
                                                 .rank = static_cast<std::uint32_t>(rank),
                                                 .chunk = id,
                                                 .array = static_cast<std::uint32_t>(of.array)});
    }
  }
}

std::span<const std::byte> StoredState::blob(int rank) const {
  const auto its = unwrap_blob(reader_->blob(rank));
  if (its) return its->blob;
  throw Error(ErrorCode::kDataLoss,
              fmt::format("{}: the blob of rank {} was not written by this engine", place_, rank));
}

void StoredState::require_whole(const char* what) const {
  if (!of_pieces_) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: {} is refused, and nothing was changed. Only the store's trainer, such as "
                  "PyTorch, chooses the pieces of its {}: open the store with the trainer "
                  "on other ranks and `resume=reshard`, or save a checkpoint with the trainer, and "
                  "load that checkpoint on other ranks",
                  place_, what, ranks_text(reader_->ranks())));
}

Task<> StoredState::read(std::size_t tensor, std::span<const TensorRun> runs,
                         std::span<std::byte> array) {
  const std::vector<Stretch>& all = stretches_[tensor];
  const std::uint64_t size = size_bytes(content_.tensors[tensor].type);
  for (const TensorRun& run : runs) {
    auto at = std::ranges::upper_bound(all, run.first, {}, &Stretch::first);
    if (at != all.begin()) --at;
    for (; at != all.end() && at->first < run.first + run.count; ++at) {
      const std::uint64_t begin = std::max(run.first, at->first);
      const std::uint64_t end = std::min(run.first + run.count, at->first + at->count);
      if (begin >= end) continue;
      const ChunkTable& table = tables_[at->rank];
      const TensorType type = content_.tensors[tensor].type;
      const ProvenBytes::Read read_it = [&](std::span<std::byte> into) {
        return read_record(static_cast<int>(at->rank), at->chunk, into);
      };
      const ProvenBytes::Bytes its = co_await records_.get(
          {at->rank, at->chunk}, {.bytes = table.chunk(at->chunk).record_bytes()}, read_it);
      const std::uint64_t first = at->at + (begin - at->first);
      const std::span<std::byte> out =
          array.subspan((run.at + (begin - run.first)) * size, (end - begin) * size);
      const std::function<void()> copy = [&] {
        take_array({table, at->chunk, its->span()}, {at->array, type}, first, out);
      };
      co_await run_pass(reactor_, workers_, "copy state", out.size(), copy);
    }
  }
}

Task<> StoredState::read_record(int rank, ChunkId chunk, std::span<std::byte> into) {
  co_await reader_->read(rank, chunk, into);
  const StateStore::Expected expected = reader_->expected(rank, chunk);
  const RecordFormat& format = tables_[static_cast<std::size_t>(rank)].record_format(chunk);
  std::uint64_t hash = expected.hash;  // what the job finds, unless the record is damaged
  const std::function<void()> job = [&] { hash = record_hash(into, expected.seed, format); };
  co_await workers_.run(reactor_, {"verify record", into.size()}, job);
  if (hash == expected.hash) co_return;
  if (co_await reader_->overtaken(rank, chunk)) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format(
            "{} was overwritten, because the store's owner went on beyond step {} while it was "
            "read: try again, save a checkpoint of the run instead, or stop the run first",
            reader_->record_name(rank, chunk), content_.step));
  }
  throw reader_->corrupt_record(rank, chunk);
}

ChunkTable StoredState::whole_table(std::uint64_t chunk_tiles_max) const {
  if (reader_->ranks() > 1) require_whole("putting its pieces together");
  const ChunkTable& part = tables_.front();
  return {whole_of(part.model(), part.sharding().tensor.ranks), chunk_tiles_max, part.state()};
}

Task<> StoredState::prove(
    const std::function<void(std::uint64_t done, std::uint64_t total)>& progress) {
  std::uint64_t total = 0;
  for (const ChunkTable& table : tables_) total += table.total_record_bytes();
  std::uint64_t done = 0;
  for (int rank = 0; rank < reader_->ranks(); ++rank) {
    for (ChunkId id = 0; id < reader_->chunk_count(rank); ++id) {
      const AlignedBytes record = memory_.take(reader_->record_bytes(rank, id));
      co_await read_record(rank, id, record.span());
      done += record.span().size();
      if (progress) progress(done, total);
    }
  }
}

}  // namespace ziggurat
