// SPDX-License-Identifier: Apache-2.0
// tests/core/trained_store.h: a store of real files on which a job of a few ranks has trained, what
// it should hold in each generation, and damage to its records.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "base/log.h"
#include "tests/core/ranks_harness.h"
#include "tests/support/store_file.h"
#include "tiers/store/state_store.h"

namespace ziggurat::testing {

inline constexpr float kLearningRate = 0.01F;
inline constexpr std::uint64_t kSteps = 3;

struct Shape {
  int ranks;
  int stripes;
  int copies = 1;  ///< of the state, each on as many ranks
};
inline void PrintTo(const Shape& shape, std::ostream* out) {
  *out << shape.ranks << " ranks, " << shape.stripes << " stripes, " << shape.copies << " copies";
}

enum class Damage { kFlipped, kStale, kAnothers, kUnreadable };
inline constexpr int kDamages = 4;

struct Place {
  std::string path;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
};

inline std::vector<std::byte> read_file(const std::string& path) {
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) ADD_FAILURE() << path;
  return bytes;
}

inline void write_at(const Place& place, std::span<const std::byte> bytes) {
  const int file = ::open(place.path.c_str(), O_WRONLY);
  ASSERT_GE(file, 0);
  ASSERT_EQ(::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(place.offset_bytes)),
            static_cast<ssize_t>(bytes.size()));
  ASSERT_EQ(::fsync(file), 0);
  ::close(file);
}

/// A trained store, its generations 3 and 2 whole, and what it should hold at each.
class TrainedStore {
 public:
  explicit TrainedStore(Shape its_shape) : shape(its_shape) {
    log().set_level(LogLevel::kOff);
    for (int stripe = 0; stripe < shape.stripes; ++stripe)
      directories.push_back({fmt::format("{}/live/{}", scratch.path(), stripe)});
    expected.emplace_back(model, config().clip_norm);
    expected.back().world_size = shape.ranks;
    if (is_hybrid()) expected.back().shard_group = group();
    while (expected.size() <= kSteps + 1) {
      expected.push_back(expected.back());
      expected.back().step(expected.size() - 2, kLearningRate);
    }
    train(1);
    save("first");
    train(kSteps - 1);
    save("trained");
  }

  EngineConfig config() const {
    EngineConfig config = small_config("");
    config.store = directories;
    config.strategy.zero_stage = group() == 1 ? 0 : 2;
    if (is_hybrid()) {
      config.strategy.name = StrategyName::kHybrid;
      config.strategy.shard_group = group();
    }
    return config;
  }
  /// Ranks that share a copy of the state.
  int group() const { return shape.ranks / shape.copies; }
  bool is_hybrid() const { return shape.copies > 1 && group() > 1; }

  /// Runs `body` on an engine of every rank; `faults` strike reads of all of them.
  std::vector<std::exception_ptr> run(const std::function<void(Engine&, int rank)>& body,
                                      const std::vector<Fault>& faults = {}) {
    const auto runtimes = connected_runtimes(shape.ranks, 1);
    for (const auto& runtime : runtimes) {
      runtime->io_engine = [&faults](Reactor& reactor, const std::string& path) {
        auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
        for (const Fault& fault : faults) faulty->plan(fault);
        return faulty;
      };
    }
    return run_ranks(shape.ranks, [&](int rank) {
      EngineConfig its = config();
      if (adjust) adjust(its);
      RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model, its);
      body(*rig.engine, rank);
    });
  }

  void train(std::uint64_t steps) {
    expect_none(run([&](Engine& engine, int rank) {
      for (std::uint64_t i = 0; i < steps; ++i) step(engine, rank);
      engine.make_durable();
    }));
  }

  void step(Engine& engine, int rank) const {
    const std::uint64_t cursor = engine.generation() + 1;
    train_step(engine, model, engine.generation(), kLearningRate,
               std::as_bytes(std::span(&cursor, 1)), 1.0F, rank);
  }

  void save(const std::string& name) const {
    std::filesystem::copy(scratch.path() + "/live", scratch.path() + "/" + name,
                          std::filesystem::copy_options::recursive);
  }
  void restore(const std::string& name) const {
    std::filesystem::remove_all(scratch.path() + "/live");
    std::filesystem::copy(scratch.path() + "/" + name, scratch.path() + "/live",
                          std::filesystem::copy_options::recursive);
  }

  /// Where the records of `generation` of one rank are, in every stripe.
  std::vector<Place> records(int rank, std::uint64_t generation) const {
    std::vector<Place> places;
    for (int stripe = 0; stripe < shape.stripes; ++stripe) {
      const std::string path = directories[static_cast<std::size_t>(stripe)].path + "/" +
                               StateStore::file_name(rank, static_cast<std::uint32_t>(stripe));
      const auto file = test::StoreFile::of(read_file(path));
      for (ChunkId chunk = 0; chunk < file->spec.record_bytes.size(); ++chunk)
        places.push_back(
            {path, file->layout.record_offset(chunk, generation), file->spec.record_bytes[chunk]});
    }
    return places;
  }

  /// Damages one record; what is to strike reads of it.
  std::vector<Fault> damage(const std::vector<Place>& all, std::size_t index, Damage kind) const {
    const Place place = all[index];
    const std::vector<std::byte> file = read_file(place.path);
    const auto begin = file.begin() + static_cast<std::ptrdiff_t>(place.offset_bytes);
    const std::vector<std::byte> whole(begin,
                                       begin + static_cast<std::ptrdiff_t>(place.size_bytes));
    std::vector<std::byte> bytes = whole;
    switch (kind) {
      case Damage::kUnreadable:
        return {Fault::fail(FaultPoint::kRead, EIO).within(place.path, place.offset_bytes, 512)};
      case Damage::kFlipped: bytes[bytes.size() / 3] ^= std::byte{1}; break;
      case Damage::kStale: {
        std::string old = place.path;
        old.replace(old.find("/live/"), 6, "/first/");
        const std::vector<std::byte> first = read_file(old);
        std::copy_n(first.begin() + static_cast<std::ptrdiff_t>(place.offset_bytes),
                    place.size_bytes, bytes.begin());
        break;
      }
      case Damage::kAnothers: {
        const Place other = all[(index + 1) % all.size()];
        const std::vector<std::byte> foreign = read_file(other.path);
        std::copy_n(foreign.begin() + static_cast<std::ptrdiff_t>(other.offset_bytes),
                    std::min(other.size_bytes, place.size_bytes), bytes.begin());
        break;
      }
    }
    if (bytes == whole) bytes.front() ^= std::byte{1};  // a slice of padding is zeros, as any other
    write_at(place, bytes);
    return {};
  }

  Shape shape;
  ScratchDirectory scratch;
  std::vector<StoreDirectory> directories;
  ModelSpec model = small_model();
  std::vector<PlainTraining> expected;          ///< by generation
  std::function<void(EngineConfig&)> adjust{};  ///< of the runs from now on
};

}  // namespace ziggurat::testing
