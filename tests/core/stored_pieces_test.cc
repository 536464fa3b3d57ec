// SPDX-License-Identifier: Apache-2.0
// tests/core/stored_pieces_test.cc: the store of a trainer that lends, seen by others: each rank's
// file is read as what it is, and nobody cuts it anew or goes on from it but its trainer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/state/store_reshard.h"
#include "core/sharding/stored_records.h"
#include "tests/core/lent_world.h"
#include "tests/core/open_store.h"

namespace ziggurat::testing {
namespace stored_pieces_test {

using ::testing::HasSubstr;

using State = std::map<std::string, std::vector<float>>;

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorCode::kUnimplemented, "none"};
}

std::map<std::string, std::string> files_in(const std::vector<std::string>& directories) {
  std::map<std::string, std::string> files;
  for (const std::string& directory : directories) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
      std::ifstream file(entry.path(), std::ios::binary);
      files[entry.path().string()] = {std::istreambuf_iterator<char>(file), {}};
    }
  }
  return files;
}

std::string tensor_name(const std::string& array, const std::string& owner) {
  return array == "master" ? owner : state_tensor_name(array, owner);
}

/// What the trainers of `owners` have, by the names of their tensors; `named`: a rank's owners.
State trained(World& world,
              const std::function<std::string(int rank, const std::string& piece)>& named) {
  State all;
  std::mutex mutex;
  expect_none(world.run([&](World::Rank rank) {
    for (int step = 0; step < 3; ++step) rank.trainer.step(rank.engine);
    rank.engine.make_durable();
    const std::vector<LentEngine::Piece> pieces = rank.engine.pieces_of(rank.number);
    for (UnitId u = 0; u < pieces.size(); ++u) {
      for (const std::string& array : rank.engine.state_names()) {
        std::vector<float> values(pieces[u].count);
        rank.engine.read_state(u, array, values);
        const std::lock_guard lock(mutex);
        all[tensor_name(array, named(rank.number, pieces[u].name))] = std::move(values);
      }
    }
  }));
  return all;
}

class StoredPieces : public ::testing::Test {
 protected:
  static std::vector<std::string> directories(const World& world) {
    std::vector<std::string> all;
    for (int rank = 0; rank < world.size(); ++rank) all.push_back(world.directory(rank));
    return all;
  }
  State read(const World& world) {
    State all;
    OpenStore store(*runtime_, directories(world));
    EXPECT_TRUE(store.state().of_pieces());
    EXPECT_EQ(store.state().content().layout.ranks, world.size());
    EXPECT_EQ(store.state().content().step, 3U);
    for (const auto& [name, bytes] : store.tensors()) {
      std::vector<float>& values = all[name];
      values.resize(bytes.size() / sizeof(float));
      std::memcpy(values.data(), bytes.data(), bytes.size());
    }
    store.prove();
    return all;
  }
  Error reshard(const std::vector<std::string>& from) {
    std::vector<StoreDirectory> store;
    for (const std::string& directory : from) store.push_back({.path = directory});
    return error_of([&] { StoreReshard(*runtime_, store); });
  }

  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
};

TEST_F(StoredPieces, OfTwoRanksAreReadOfEach) {
  World world(kTwo, Where::kNvme);
  const State expected = trained(world, [](int, const std::string& piece) { return piece; });
  const auto before = files_in(directories(world));
  EXPECT_EQ(read(world), expected);
  EXPECT_EQ(files_in(directories(world)), before);
}

TEST_F(StoredPieces, OfTheSameNamesAreToldApartByTheirRank) {
  World world({{0, 1, 2}, {1, 3}, {1}}, Where::kHost);
  const State expected = trained(world, [](int rank, const std::string& piece) {
    return rank == 0 ? piece : fmt::format("rank{}/{}", rank, piece);
  });
  EXPECT_EQ(read(world), expected);
}

TEST_F(StoredPieces, AreNotCutAnew) {
  World world(kTwo, Where::kNvme);
  trained(world, [](int, const std::string& piece) { return piece; });
  const auto before = files_in(directories(world));
  const Error error = reshard(directories(world));
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("nothing was changed. Only the store's trainer"));
  OpenStore store(*runtime_, directories(world));
  EXPECT_THAT(error_of([&] { store.state().whole_table(32); }).what(), HasSubstr("2 ranks"));
  EXPECT_EQ(files_in(directories(world)), before);
}

/// The store of one rank, in a directory.
class StoredPiecesAlone : public StoredPieces {
 protected:
  void SetUp() override {
    LentTrainer trainer(model_, {});
    const auto engine = LentEngine::open(model_, config_, *runtime_, trainer.lent());
    trainer.step(*engine);
    engine->make_durable();
  }
  ScratchDirectory scratch_;
  const ModelSpec model_ = lent_model({105, 16'385}, DType::kFloat32);
  EngineConfig config_ = config_of(Where::kNvme, scratch_.path());
};

TEST_F(StoredPiecesAlone, AreNotCutAnew) {
  const auto before = files_in({scratch_.path()});
  EXPECT_THAT(reshard({scratch_.path()}).what(), HasSubstr("Only the store's trainer"));
  EXPECT_EQ(files_in({scratch_.path()}), before);
  LentTrainer trainer(model_, {});
  const auto engine = LentEngine::open(model_, config_, *runtime_, trainer.lent());
  EXPECT_EQ(engine->generation(), 1U);
}

TEST_F(StoredPiecesAlone, AreNoneOfATrainerWhoseParametersAreTheEngines) {
  const auto before = files_in({scratch_.path()});
  const auto device = HostDevice::create(runtime_->reactor, 64 * kMiB, nullptr);
  EngineConfig config = small_config(scratch_.path());
  const std::vector<std::pair<EngineConfig::Resume, std::string>> refusals{
      {EngineConfig::Resume::kAuto, "only the trainer that made it"},
      {EngineConfig::Resume::kReshard, "Only the store's trainer"}};
  for (const auto& [resume, words] : refusals) {
    config.resume = resume;
    const Error error = error_of([&] {
      Engine::open(model_, config, *runtime_, *device,
                   [](UnitId, std::uint64_t, std::span<float>) {});
    });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(words));
  }
  EXPECT_EQ(files_in({scratch_.path()}), before);
}

TEST(LayoutOfPieces, IsToldFromThatOfWholeTensorsAndOpensAlike) {
  const ModelSpec model = lent_model({105, 40'000}, DType::kFloat32);
  const std::string whole = ChunkTable(model, 4).layout();
  const std::string pieces = layout_of_pieces(whole);
  EXPECT_FALSE(is_of_pieces(whole));
  EXPECT_TRUE(is_of_pieces(pieces));
  for (const std::string& layout : {whole, pieces})
    EXPECT_EQ(ChunkTable::from_layout(model, layout).layout(), whole);
}

TEST(LayoutOfPieces, IsKnownOfStoresThatTheCInterfaceMadeBeforeLayoutsSaidSo) {
  ModelSpec model = lent_model({105, 40'000}, DType::kFloat32);
  model.name = "embedded";
  EXPECT_TRUE(is_of_pieces(ChunkTable(model, 4).layout()));
  model.units[0].params.push_back({.name = "another", .shape = {7}});
  EXPECT_FALSE(is_of_pieces(ChunkTable(model, 4).layout()));
}

}  // namespace stored_pieces_test
}  // namespace ziggurat::testing
