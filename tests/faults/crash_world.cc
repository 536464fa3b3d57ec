// SPDX-License-Identifier: Apache-2.0
// tests/faults/crash_world.cc: the job, and the judge.
#include "tests/faults/crash_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "base/bytes.h"
#include "base/log.h"
#include "tests/support/aligned_memory.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::faults {
namespace {

using test::AlignedMemory;

/// Marks a record that was written on a guess: no generation that anybody may find.
constexpr std::uint64_t kGuess = std::uint64_t{1} << 63;
/// Virtual time in which a guess turns out wrong: before, while and after its writes are under way.
constexpr std::uint64_t kGuessUsMax = 400;

AlignedMemory& scratch_memory(int rank, int stripes) {
  static std::map<std::pair<int, int>, std::unique_ptr<AlignedMemory>> memory;
  auto& mine = memory[{rank, stripes}];
  if (!mine)
    mine = std::make_unique<AlignedMemory>(
        StripedStore::scratch_bytes(static_cast<std::size_t>(stripes)));
  return *mine;
}

}  // namespace

std::string describe(const LaunchResult& result) {
  if (!result.error) return "finished";
  try {
    std::rethrow_exception(result.error);
  } catch (const Error& error) {
    return fmt::format("{}: {}", to_string(error.code()), error.what());
  } catch (const std::exception& error) {
    return error.what();
  }
}

ErrorCode code_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.code();
  }
}

struct CrashWorld::Rank {
  Rank(Reactor& on, Meeting& all, int number) : quorum(all, number, all.members()), reactor(on) {}
  MeetingQuorum quorum;
  std::vector<std::unique_ptr<SimulatedEngine>> engines;  ///< by stripe
  std::vector<StripePlace> places;
  Reactor& reactor;
  std::vector<std::unique_ptr<AlignedMemory>> staging;
  std::unique_ptr<AlignedMemory> records;  ///< all of them, one after the other
  std::unique_ptr<StripedStore> store;
  std::vector<Tag> found;  ///< by chunk, then the blob
  bool verified = false;
};

CrashWorld::CrashWorld(WorldOptions options)
    : options_(std::move(options)), disk_(options_.capacity_bytes) {
  log().set_level(LogLevel::kOff);  // thousands of dying jobs have the same thing to say
}
CrashWorld::CrashWorld(const CrashWorld& other)
    : options_(other.options_),
      disk_(other.disk_),
      fault_(other.fault_),
      launches_(other.launches_),
      written_(other.written_),
      creations_(other.creations_),
      durable_(other.durable_) {}
CrashWorld::~CrashWorld() = default;

StoreSpec CrashWorld::spec() const {
  StoreSpec spec;
  spec.layout = R"({"model":"test"})";
  spec.run_identity = "seed=1";
  spec.numerics_fingerprint = "scalar";
  spec.record_bytes = options_.record_bytes;
  spec.record_format = options_.record_format;
  spec.slots = options_.slots;
  spec.blob_capacity_bytes = 4096;
  return spec;
}

std::optional<std::uint64_t> CrashWorld::promised() const {
  if (durable_.empty()) return std::nullopt;
  return *std::ranges::min_element(durable_);
}

void CrashWorld::blame(const std::string& fault) {
  if (fault_.empty()) fault_ = fault;
}

LaunchResult CrashWorld::launch(const Launch& launch) {
  ++launches_;
  durable_.resize(static_cast<std::size_t>(options_.ranks));
  LaunchResult result;
  Reactor reactor(Clock::Kind::kVirtual);
  Meeting all(reactor, options_.ranks);
  ranks_.clear();
  for (int number = 0; number < options_.ranks; ++number) {
    ranks_.push_back(std::make_unique<Rank>(reactor, all, number));
    Rank& rank = *ranks_.back();
    for (int stripe = 0; stripe < options_.stripes; ++stripe) {
      SimulatedEngineOptions io;
      const auto drive = static_cast<std::uint64_t>(number * options_.stripes + stripe);
      io.seed = launch.seed * 64 + drive;
      io.sync_is_a_lie = launch.sync_is_a_lie;
      io.sync_fails = launch.sync_fails;
      if (launch.write_fate) {
        io.write_fate = [fate = launch.write_fate, drive](std::uint64_t index) {
          return fate(drive, index);
        };
      }
      rank.engines.push_back(std::make_unique<SimulatedEngine>(reactor, disk_, std::move(io)));
      rank.places.push_back({.io = *rank.engines.back(), .observers = {}, .directory = kDirectory});
    }
  }
  std::vector<std::vector<std::string>> paths(static_cast<std::size_t>(options_.ranks));
  for (int number = 0; number < options_.ranks; ++number) {
    for (int stripe = 0; stripe < options_.stripes; ++stripe)
      paths[static_cast<std::size_t>(number)].push_back(
          path(number, static_cast<std::uint32_t>(stripe)));
  }
  provable_ = look_at(disk_, paths);
  const bool may_refuse = provable_.applies && !provable_.newest;
  const std::optional<SimulatedDisk> before =
      may_refuse ? std::optional<SimulatedDisk>(disk_) : std::nullopt;
  if (launch.power_cut_after) disk_.cut_power_after(*launch.power_cut_after);
  const std::uint64_t events_before = disk_.events();
  std::size_t ended = 0;
  result.errors.resize(ranks_.size());
  for (auto& rank : ranks_) {
    const auto number = static_cast<std::size_t>(rank->quorum.rank());
    reactor.spawn(run_rank(*rank, launch), [&, number](std::exception_ptr error) {
      ++ended;
      result.errors[number] = error;
      if (!result.error) result.error = error;
      all.lose(error);
    });
  }
  reactor.run_until_idle();
  result.events = disk_.events() - events_before;
  result.started = std::ranges::all_of(ranks_, [](const auto& each) { return each->verified; });
  result.finished = ended == 0;
  for (auto& rank : ranks_) {
    result.notes.push_back(rank->store ? rank->store->state().notes : std::vector<std::string>{});
    if (rank->verified) result.resumed_at = rank->found.front().generation;
  }
  ranks_.clear();
  if (result.error && !disk_.power_is_off()) {
    if (before && launch.start != Launch::Start::kCreate) {
      judge_refusal(result, *before);
    } else if (!launch.sync_fails) {
      blame(provable_.newest
                ? fmt::format("launch {} generation {} is whole, but: {}", provable_.newest->launch,
                              provable_.newest->generation, describe(result))
                : describe(result));
    }
  }
  return result;
}

Task<> CrashWorld::run_rank(Rank& rank, const Launch& launch) {
  co_await start(rank, launch);
  rank.verified = true;
  if (std::ranges::all_of(ranks_, [](const auto& each) { return each->verified; })) judge();
  for (int i = 0; i < launch.steps; ++i) {
    // The engine's own way: each rank's durable generation rides on the norm's all-reduce of the
    // next step.
    const std::uint64_t everywhere = co_await rank.quorum.min(rank.store->durable_generation());
    rank.store->set_durable_everywhere(everywhere);
    co_await step(rank, rank.store->durable_generation() + 1, launch);
  }
}

Task<> CrashWorld::start(Rank& rank, const Launch& launch) {
  StripedStore::Environment environment{
      .reactor = rank.reactor,
      .ranks = rank.quorum,
      .places = rank.places,
      .staging =
          [&rank](std::uint64_t size_bytes) {
            rank.staging.push_back(std::make_unique<AlignedMemory>(size_bytes));
            return rank.staging.back()->bytes();
          },
      .scratch = scratch_memory(rank.quorum.rank(), options_.stripes).bytes()};
  std::uint64_t total_bytes = 0;
  for (const std::uint64_t size_bytes : options_.record_bytes) total_bytes += size_bytes;
  rank.records = std::make_unique<AlignedMemory>(total_bytes);

  bool resume = launch.start == Launch::Start::kResume;
  if (launch.start == Launch::Start::kAuto)
    resume = co_await rank.quorum.max(
                 StripedStore::exists(rank.places, rank.quorum.rank()) ? 1 : 0) != 0;
  StoreSpec wanted = spec();
  if (resume) {
    Task<std::unique_ptr<StripedStore>> opening = StripedStore::open(std::move(environment));
    rank.store = co_await std::move(opening);
    co_await settle(rank);
  } else {
    Task<std::unique_ptr<StripedStore>> creating =
        StripedStore::create(std::move(environment), std::move(wanted));
    rank.store = co_await std::move(creating);
    creations_.insert(launches_);
    co_await step(rank, 0, launch);
    std::vector<RecordDamage> damaged;
    co_await look_at_records(rank, damaged);
    if (!damaged.empty() && !disk_.power_is_off()) blame("a store that was just made is damaged");
  }
}

/// Until a generation that the store offers stands.
Task<> CrashWorld::settle(Rank& rank) {
  for (bool stands = false; !stands;) {
    std::vector<RecordDamage> damaged;
    co_await look_at_records(rank, damaged);
    Task<bool> settling = rank.store->settle(std::move(damaged));
    stands = co_await std::move(settling);
  }
}

/// The chunk's memory, with the bytes of this launch and generation.
std::span<std::byte> CrashWorld::fill_record(Rank& rank, ChunkId chunk,
                                             std::uint64_t tagged_generation) {
  std::span<std::byte> memory = rank.records->bytes();
  for (ChunkId before = 0; before < chunk; ++before)
    memory = memory.subspan(options_.record_bytes[before]);
  const auto record = memory.first(options_.record_bytes[chunk]);
  write_pattern(record, {launches_, tagged_generation}, place_of(rank.quorum.rank(), chunk));
  return record;
}

/// Writes the record; with `discarded`, first on a guess, and anew once that is discarded: after
/// its write has ended, as the sweep does.
Task<> CrashWorld::write(Rank& rank, std::uint64_t generation, ChunkId chunk, Signal* discarded) {
  StripedStore& store = *rank.store;
  if (discarded != nullptr) {
    const auto guess = fill_record(rank, chunk, generation | kGuess);
    co_await store.write(
        chunk, generation, guess,
        record_hash(guess, store.write_seed(chunk, generation), options_.record_format));
    co_await discarded->wait();
  }
  const auto record = fill_record(rank, chunk, generation);
  co_await store.write(
      chunk, generation, record,
      record_hash(record, store.write_seed(chunk, generation), options_.record_format));
}

Task<> CrashWorld::step(Rank& rank, std::uint64_t generation, const Launch& launch) {
  const Tag tag{launches_, generation};
  written_.insert({tag.launch, generation});
  WorkGroup writes(rank.reactor);
  Signal discarded(rank.reactor);
  const bool guesses = launch.speculates && generation > 0;
  std::mt19937_64 random(launch.seed * 64 + static_cast<std::uint64_t>(rank.quorum.rank()));
  const auto count = static_cast<ChunkId>(options_.record_bytes.size());
  std::vector<ChunkId> late;  // not begun when the guess turns out wrong
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    if (guesses && random() % 4 == 0) {
      late.push_back(chunk);
    } else {
      writes.spawn(write(rank, generation, chunk, guesses ? &discarded : nullptr));
    }
  }
  if (guesses) {
    Signal refuted(rank.reactor);
    rank.reactor.clock().after(std::chrono::microseconds(random() % kGuessUsMax),
                               [&refuted] { refuted.set(); });
    co_await refuted.wait();
    rank.store->discard(generation);
    discarded.set();
  }
  for (const ChunkId chunk : late) writes.spawn(write(rank, generation, chunk, nullptr));
  co_await writes.wait_idle();
  const auto blob = blob_of(tag, rank.quorum.rank());
  const std::function<void()> nothing;
  co_await rank.store->commit(generation, blob, nothing);
  durable_[static_cast<std::size_t>(rank.quorum.rank())] = generation;
  if (generation > 0) co_return;
  // A new store has taken the name on every rank: whatever was there before must not be found
  // again.
  std::erase_if(written_, [&](const auto& entry) { return entry.first != tag.launch; });
  std::ranges::fill(durable_, generation);
  creations_.clear();
}

/// Reads every record of the generation that the store stands at. What the store takes for whole is
/// compared, byte by byte, with what that generation's writer wrote.
Task<> CrashWorld::look_at_records(Rank& rank, std::vector<RecordDamage>& damaged) {
  StripedStore& store = *rank.store;
  const std::uint64_t generation = store.durable_generation();
  const int number = rank.quorum.rank();
  rank.found.clear();
  for (ChunkId chunk = 0; chunk < store.chunk_count(); ++chunk) {
    const auto record = rank.records->bytes().first(store.record_bytes(chunk));
    std::string fault;
    try {
      co_await store.read(chunk, generation, record);
      const StateStore::Expected expected = store.expected(chunk, generation);
      if (record_hash(record, expected.seed, options_.record_format) != expected.hash)
        fault = "wrong checksum";
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDataLoss) throw;
      fault = error.what();
    }
    if (!fault.empty()) {
      damaged.push_back({.chunk = chunk, .fault = std::move(fault)});
      continue;
    }
    const Tag tag = tag_in(record);
    if (!has_pattern(record, tag, place_of(number, chunk)))
      blame(fmt::format("rank {} chunk {} generation {}: bytes are not those that launch {} wrote",
                        number, chunk, generation, tag.launch));
    rank.found.push_back(tag);
  }
  const auto& blob = store.state().blob;
  const Tag tag = tag_in(blob);
  if (blob != blob_of(tag, number))
    blame(fmt::format("rank {} generation {}: the blob is not what launch {} gave", number,
                      generation, tag.launch));
  rank.found.push_back(tag);
}

/// One launch and one generation on every chunk of every rank; not older than what was promised, at
/// most one newer; and of a history that this directory can have had.
void CrashWorld::judge() {
  const Tag found = ranks_.front()->found.front();
  if (found.launch != launches_ && provable_.applies && provable_.newest != found)
    blame(fmt::format("opened launch {} generation {}, whole is {}", found.launch, found.generation,
                      provable_.newest
                          ? fmt::format("launch {} generation {}", provable_.newest->launch,
                                        provable_.newest->generation)
                          : "none"));
  if (found.launch != launches_ && provable_.applies && provable_.heard_of > found.generation)
    judge_notes(fmt::format("fell back from generation {} to generation {}", provable_.heard_of,
                            found.generation));
  for (const auto& rank : ranks_) {
    for (std::size_t chunk = 0; chunk < rank->found.size(); ++chunk) {
      const Tag tag = rank->found[chunk];
      if (tag != found)
        blame(
            fmt::format("histories mix: rank {} chunk {} is of launch {} generation {}, rank 0 "
                        "chunk 0 of launch {} generation {}",
                        rank->quorum.rank(), chunk, tag.launch, tag.generation, found.launch,
                        found.generation));
    }
  }
  if (!options_.lying_drives && !written_.contains({found.launch, found.generation}))
    blame(fmt::format("launch {} generation {} came back from the dead", found.launch,
                      found.generation));
  const std::uint64_t least = promised().value_or(0);
  const bool created = found.generation == 0 && creations_.contains(found.launch);
  if (!options_.lying_drives && !created &&
      (found.generation < least || found.generation > least + 1))
    blame(fmt::format("generation {} recovered, {} had been reported durable on every rank",
                      found.generation, least));
  written_ = {{found.launch, found.generation}};
  creations_.clear();
  std::ranges::fill(durable_, found.generation);
}

/// Every rank says it.
void CrashWorld::judge_notes(const std::string& wanted) {
  for (const auto& rank : ranks_) {
    const auto& notes = rank->store->state().notes;
    if (std::ranges::none_of(
            notes, [&](const auto& note) { return note.find(wanted) != std::string::npos; }))
      blame(fmt::format("rank {} does not say that it {}", rank->quorum.rank(), wanted));
  }
}

/// Nothing was whole: the store says so, and has changed nothing.
void CrashWorld::judge_refusal(const LaunchResult& result, const SimulatedDisk& before) {
  for (const auto& error : result.errors) {
    if (!error) blame("a rank goes on where no generation is whole");
  }
  if (code_of(result.error) != ErrorCode::kDataLoss &&
      code_of(result.error) != ErrorCode::kUnavailable)
    blame(describe(result));
  for (int number = 0; number < options_.ranks; ++number) {
    for (int stripe = 0; stripe < options_.stripes; ++stripe) {
      const std::string file = path(number, static_cast<std::uint32_t>(stripe));
      if (disk_.contents(file) != before.contents(file))
        blame(fmt::format("{} was changed, and then refused", file));
    }
  }
}

}  // namespace ziggurat::faults
