// SPDX-License-Identifier: Apache-2.0
// tests/faults/fault_jobs.cc: each job knows every byte that it ought to find.
#include "tests/faults/fault_jobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>

#include "aio/direct_file.h"
#include "base/bytes.h"
#include "base/checksum.h"
#include "base/runtime/async.h"
#include "tests/support/aligned_memory.h"
#include "tiers/store/quorum.h"
#include "tiers/store/record_hash.h"
#include "tiers/store/state_store.h"
#include "tiers/store/swap_file.h"

namespace ziggurat::faults {
namespace {

constexpr std::uint64_t kPage = 4096;

using test::AlignedMemory;

/// Bytes that differ from page to page and from seed to seed.
void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  for (std::size_t page = 0; page * kPage < bytes.size(); ++page) {
    const auto part = bytes.subspan(page * kPage, std::min(kPage, bytes.size() - page * kPage));
    std::ranges::fill(part, static_cast<std::byte>(mix_seed(seed, page)));
  }
}

bool filled(std::span<const std::byte> bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != static_cast<std::byte>(mix_seed(seed, i / kPage))) return false;
    // The rest of the page is equal if it is equal to itself moved by one.
    const std::size_t end = std::min<std::size_t>(bytes.size(), round_up(i + 1, kPage));
    if (!std::equal(bytes.begin() + i + 1, bytes.begin() + end, bytes.begin() + i)) return false;
    i = end - 1;
  }
  return true;
}

/// Runs `work` until its first Error.
template <class Work>
std::optional<Error> error_of(Work&& work) {
  try {
    work();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

void remove_if_there(const Bench& bench, const std::string& path) {
  if (bench.drive.exists(path)) bench.drive.remove(path);
}

Verdict run_file(const Bench& bench) {
  static const AlignedMemory out(DirectFile::kBlockBytes + 5 * kPage), in(out.bytes().size());
  const std::string path = bench.directory + "/data", moved = bench.directory + "/moved";
  Verdict verdict;
  verdict.error = error_of([&] {
    OpenOptions options;
    options.create = true;
    options.writable = true;
    const auto file = DirectFile::open(bench.reactor, bench.drive, path, options);
    file->allocate(out.bytes().size());
    fill(out.bytes(), 1);
    bench.reactor.block_on(file->write(0, out.bytes()));
    bench.reactor.block_on(file->sync());
    bench.drive.rename(path, moved);
    file->set_path(moved);
    bench.drive.sync_directory(bench.directory);
    fill(in.bytes(), 2);
    bench.reactor.block_on(file->read(0, in.bytes()));
    if (!filled(in.bytes(), 1)) verdict.silent = "a read gave other bytes than were written";
    if (file->size_bytes() != out.bytes().size()) verdict.silent = "another size";
    if (!bench.drive.exists(moved)) verdict.silent = "a renamed file is not there";
    bench.drive.remove(moved);
  });
  bench.drive.clear_plan();
  remove_if_there(bench, path);
  remove_if_there(bench, moved);
  return verdict;
}

Verdict run_swap(const Bench& bench) {
  static const AlignedMemory memory(kMiB);
  const std::vector<std::uint64_t> sizes{kPage, 100 * kKiB, 3 * kPage};
  Verdict verdict;
  verdict.error = error_of([&] {
    const auto swap = SwapFile::create(
        bench.reactor, {{.io = bench.drive, .observers = {}, .directory = bench.directory}}, sizes);
    const auto item = [&](std::size_t i) { return memory.bytes().first(sizes[i]); };
    for (std::uint64_t round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        fill(item(i), 10 * round + i);
        bench.reactor.block_on(swap->write(i, item(i), hash64(item(i), i)));
      }
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        fill(item(i), 99);
        bench.reactor.block_on(swap->read(i, item(i)));
        if (hash64(item(i), i) != swap->expected_hash(i)) throw Error(swap->corrupt_item(i));
        if (!filled(item(i), 10 * round + i)) {
          verdict.silent = fmt::format("item {} came back wrong, with the right hash", i);
        }
      }
    }
  });
  bench.drive.clear_plan();
  return verdict;
}

class StoreLife {
 public:
  StoreLife(const Bench& bench, std::uint64_t steps) : bench_(bench), steps_(steps) {
    spec_.layout = "{}";
    spec_.record_bytes = {kTileBytes, 2 * kTileBytes, kTileBytes};
    spec_.blob_capacity_bytes = kPage;
  }

  Verdict run() {
    verdict_.error = error_of([&] {
      store_ = bench_.reactor.block_on(StateStore::create(environment(), bench_.directory, spec_));
      for (std::uint64_t generation = 0; generation <= steps_; ++generation) step(generation);
      open();
      verify();
      step(store_->durable_generation() + 1);
    });
    store_.reset();
    bench_.drive.clear_plan();
    look_on_a_sound_drive();
    store_.reset();
    remove_if_there(bench_, path());
    remove_if_there(bench_, bench_.directory + "/" + StateStore::temporary_name(0));
    return verdict_;
  }

 private:
  std::string path() const { return bench_.directory + "/" + StateStore::file_name(0); }

  StoreEnvironment environment() {
    static const AlignedMemory scratch_memory(kMiB);
    StoreEnvironment environment{
        bench_.reactor, bench_.drive, ranks_, {}, {}, scratch_memory.bytes(), {}};
    environment.staging = [this](std::uint64_t size_bytes) {
      return staging_.emplace_back(std::make_unique<AlignedMemory>(size_bytes))->bytes();
    };
    return environment;
  }

  static std::uint64_t seed(ChunkId chunk, std::uint64_t generation) {
    return 100 * generation + chunk;
  }

  void open() {
    store_.reset();
    store_ = bench_.reactor.block_on(StateStore::open(environment(), bench_.directory));
    while (!bench_.reactor.block_on(store_->settle(damaged()))) {
    }
  }

  /// The records that do not read as they were written, in the generation that the store stands at.
  std::vector<RecordDamage> damaged() {
    std::vector<RecordDamage> damaged;
    const std::uint64_t generation = store_->durable_generation();
    for (ChunkId chunk = 0; chunk < spec_.record_bytes.size(); ++chunk) {
      const auto record = memory().first(spec_.record_bytes[chunk]);
      try {
        bench_.reactor.block_on(store_->read(chunk, generation, record));
        const auto expected = store_->expected(chunk, generation);
        if (record_hash(record, expected.seed) != expected.hash)
          damaged.push_back({.chunk = chunk, .fault = "wrong checksum"});
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kDataLoss) throw;
        damaged.push_back({.chunk = chunk, .fault = error.what(), .native = error.native()});
      }
    }
    return damaged;
  }

  /// All records at once, as an engine writes them.
  Task<> write_records(std::uint64_t generation) {
    WorkGroup writes(bench_.reactor);
    auto rest = memory();
    for (ChunkId chunk = 0; chunk < spec_.record_bytes.size(); ++chunk) {
      const auto record = rest.first(spec_.record_bytes[chunk]);
      rest = rest.subspan(record.size());
      fill(record, seed(chunk, generation));
      writes.spawn(store_->write(chunk, generation, record,
                                 record_hash(record, store_->write_seed(chunk, generation))));
    }
    co_await writes.wait_idle();
  }

  void step(std::uint64_t generation) {
    bench_.reactor.block_on(write_records(generation));
    const std::vector<std::byte> blob(8, static_cast<std::byte>(generation));
    const std::function<void()> nothing;
    bench_.reactor.block_on(store_->commit(generation, blob, nothing));
    promised_ = generation;
  }

  /// Everything that the store says it holds. Wrong bytes under a wrong hash are an error; under
  /// the right one they are silent.
  void verify() {
    const std::uint64_t generation = store_->durable_generation();
    const auto& state = store_->state();
    if (promised_ && generation < *promised_ && state.notes.empty()) {
      verdict_.rolled_back = true;
    }
    if (state.blob != std::vector<std::byte>(8, static_cast<std::byte>(generation))) {
      verdict_.silent = fmt::format("another blob than generation {}'s", generation);
    }
    for (ChunkId chunk = 0; chunk < spec_.record_bytes.size(); ++chunk) {
      const auto record = memory().first(spec_.record_bytes[chunk]);
      bench_.reactor.block_on(store_->read(chunk, generation, record));
      const auto expected = store_->expected(chunk, generation);
      if (record_hash(record, expected.seed) != expected.hash) {
        throw Error(store_->corrupt_record(chunk, generation));
      }
      if (!filled(record, seed(chunk, generation))) {
        verdict_.silent = fmt::format(
            "chunk {} of generation {} came back wrong, with the right "
            "hash",
            chunk, generation);
      }
    }
  }

  void look_on_a_sound_drive() {
    verdict_.damage = error_of([&] {
      if (!StateStore::exists(bench_.drive, bench_.directory, 0)) {
        if (promised_) verdict_.silent = "a store that was finished is not there";
        return;
      }
      open();
      verify();
    });
  }

  static std::span<std::byte> memory() {
    static const AlignedMemory records(4 * kTileBytes);
    return records.bytes();
  }

  Bench bench_;
  std::uint64_t steps_;
  SoloQuorum ranks_;
  StoreSpec spec_;
  std::vector<std::unique_ptr<AlignedMemory>> staging_;
  std::unique_ptr<StateStore> store_;
  std::optional<std::uint64_t> promised_;
  Verdict verdict_;
};

}  // namespace

Job file_job() { return {"file", run_file, false}; }
Job swap_job() { return {"swap file", run_swap, true}; }
Job store_job(std::uint64_t steps) {
  return {fmt::format("store of {} steps", steps),
          [steps](const Bench& bench) { return StoreLife(bench, steps).run(); }, true};
}

}  // namespace ziggurat::faults
