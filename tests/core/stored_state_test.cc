// SPDX-License-Identifier: Apache-2.0
// tests/core/stored_state_test.cc: a store of any layout, read by one process as it lies on the
// drives: the bits that its ranks would save, at rest and while they train; nothing of it changes.
#include "core/checkpoint/stored_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>

#include "aio/faulty_engine.h"
#include "tests/core/checkpoint_rig.h"
#include "tests/core/open_store.h"
#include "tiers/store/store_reader.h"

namespace ziggurat::testing {
namespace stored_state_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::map<std::string, std::string> files_in(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    files[entry.path().filename().string()] = file_bytes(entry.path());
  return files;
}

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorCode::kUnimplemented, "none"};
}

class EveryStore : public ::testing::TestWithParam<Layout> {
 protected:
  ScratchDirectory scratch_;
  std::string store_ = scratch_.path() + "/store-" + GetParam().name;
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
};

TEST_P(EveryStore, HasTheBitsThatItsRanksSave) {
  const CheckpointRequest saved{.folder = scratch_.path() + "/saved", .resume = {}};
  on_ranks(GetParam(), scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(saved);
  });
  const auto before = files_in(store_);
  {
    OpenStore store(*runtime_, store_);
    EXPECT_EQ(store.state().content().step, 3U);
    EXPECT_THAT(differing(store.tensors(), tensors_of(saved.folder + "/" + checkpoint_name(3))),
                IsEmpty());
    store.prove();
  }
  EXPECT_TRUE(files_in(store_) == before) << "a store that was read has changed";
}

INSTANTIATE_TEST_SUITE_P(
    Stores, EveryStore,
    ::testing::Values(Layout{.name = "one"}, Layout{.name = "host", .optimizer = Tier::kHost},
                      Layout{.name = "two_stage0", .ranks = 2, .stage = 0},
                      Layout{.name = "three", .ranks = 3},
                      Layout{.name = "four_hybrid", .ranks = 4, .shard_group = 2},
                      Layout{.name = "four_tp2", .ranks = 4, .tp = 2},
                      Layout{.name = "split", .format = StateFormat::kSplit},
                      Layout{.name = "bf16", .ranks = 2, .format = StateFormat::kBf16},
                      Layout{.name = "eight_bit", .ranks = 2, .format = StateFormat::k8Bit}),
    [](const auto& its) { return its.param.name; });

class LiveStore : public ::testing::Test {
 protected:
  ScratchDirectory scratch_;
  std::unique_ptr<Runtime> reading_ = Runtime::create({.threads = 1, .trace_path = ""});
};

TEST_F(LiveStore, IsReadWhileItsOwnerHasItAndGoesOn) {
  const Layout layout{.name = "live", .ranks = 2};
  const std::string directory = scratch_.path() + "/store-live";
  TensorBytes third;
  on_ranks(layout, scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->make_durable();
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    OpenStore store(*reading_, directory);
    EXPECT_EQ(store.state().content().step, 3U);
    third = store.tensors();
  });
  OpenStore at_rest(*reading_, directory);
  EXPECT_THAT(differing(third, at_rest.tensors()), IsEmpty());
}

/// A read that fails once costs no generation: whoever cuts the store anew would lose it for good.
TEST_F(LiveStore, IsLookedAtAgainWhereAReadFails) {
  const std::string directory = scratch_.path() + "/store-two";
  on_ranks({.name = "two", .ranks = 2}, scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
  });
  std::uint64_t struck = 0;
  for (bool ended = false; !ended; ++struck) {
    SCOPED_TRACE(::testing::Message() << "read " << struck);
    reading_->reactor.block_on(
        [](Runtime& runtime, const std::string& from, std::uint64_t call, bool& over) -> Task<> {
          FaultyEngine io(runtime.reactor, std::make_unique<ThreadEngine>(runtime.reactor));
          io.plan(Fault::fail(FaultPoint::kRead, EIO).at(call));
          std::vector<StripePlace> places;
          places.push_back({.io = io, .observers = {}, .directory = from});
          std::unique_ptr<StoredState> state;
          try {
            Task<std::unique_ptr<StoredState>> opening =
                StoredState::open(runtime.reactor, *runtime.workers, std::move(places));
            state = co_await std::move(opening);
            EXPECT_EQ(state->content().step, 3U);
          } catch (const Error& error) {
            EXPECT_EQ(error.native(), EIO) << error.what();
          }
          over = io.injected(FaultPoint::kRead) == 0;
          state.reset();
        }(*reading_, directory, struck, ended));
  }
  EXPECT_GT(struck, 8U);
}

/// What a store is made of is asked for before it is opened; the first look may be at a moment when
/// nothing of it can be read.
TEST_F(LiveStore, IsLookedAtAgainForWhatItIsMadeOf) {
  const std::string directory = scratch_.path() + "/store-one";
  on_ranks({.name = "one"}, scratch_, "", [&](CheckpointRank& rank) { rank.step(); });
  for (std::uint64_t failing = 1; failing <= 6; ++failing) {
    SCOPED_TRACE(failing);
    reading_->reactor.block_on(
        [](Runtime& runtime, const std::string& from, std::uint64_t reads) -> Task<> {
          FaultyEngine io(runtime.reactor, std::make_unique<ThreadEngine>(runtime.reactor));
          for (std::uint64_t call = 0; call < reads; ++call)
            io.plan(Fault::fail(FaultPoint::kRead, EIO).at(call));
          std::vector<StripePlace> places;
          places.push_back({.io = io, .observers = {}, .directory = from});
          Task<std::optional<StoreSpec>> asking =
              StoreReader::spec_of(runtime.reactor, std::move(places), 0);
          const std::optional<StoreSpec> its = co_await std::move(asking);
          EXPECT_TRUE(its && !its->layout.empty());
        }(*reading_, directory, failing));
  }
}

TEST_F(LiveStore, ThatHasGoneOnTooFarSaysSoAndIsOpenedAnew) {
  const std::string directory = scratch_.path() + "/store-live";
  on_ranks({.name = "live"}, scratch_, "", [&](CheckpointRank& rank) {
    rank.step();
    rank.engine->make_durable();
    OpenStore store(*reading_, directory);
    for (int step = 0; step < 4; ++step) rank.step();
    rank.engine->make_durable();
    const Error error = error_of([&] { store.prove(); });
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("went on beyond step 1"));
    OpenStore again(*reading_, directory);
    EXPECT_EQ(again.state().content().step, 5U);
    again.prove();
  });
}

TEST_F(LiveStore, NamesARecordThatIsDamagedAndAFileThatIsMissing) {
  const std::string directory = scratch_.path() + "/store-two";
  on_ranks({.name = "two", .ranks = 2}, scratch_, "", [&](CheckpointRank& rank) { rank.step(); });
  const std::filesystem::path second = directory + "/rank00001.ziggurat";
  std::string bytes = file_bytes(second);
  const std::string whole = bytes;
  // Somewhere in the records: superblocks and tables are a small part of the file.
  for (std::size_t at = bytes.size() / 2; at < bytes.size() / 2 + 4096; ++at) bytes[at] ^= 1;
  std::ofstream(second, std::ios::binary) << bytes;
  const Error damaged = error_of([&] {
    OpenStore store(*reading_, directory);
    store.prove();
    // The damage was in the other generation's slots: then in these.
    bytes = whole;
    for (std::size_t at = 0; at < bytes.size() - 512 * 1024; ++at)
      if (at > 512 * 1024) bytes[at] ^= 1;
    std::ofstream(second, std::ios::binary) << bytes;
    OpenStore again(*reading_, directory);
    again.prove();
  });
  EXPECT_EQ(damaged.code(), ErrorCode::kDataLoss);
  EXPECT_THAT(damaged.what(), HasSubstr("rank00001.ziggurat"));
  std::filesystem::remove(second);
  const Error missing = error_of([&] { OpenStore store(*reading_, directory); });
  EXPECT_THAT(missing.what(), HasSubstr("2 ranks"));
  EXPECT_THAT(error_of([&] { OpenStore store(*reading_, scratch_.path()); }).what(),
              HasSubstr("there is no store"));
}

TEST_F(LiveStore, OverSeveralDrivesIsFoundInAnyOrderOfThem) {
  const Layout layout{.name = "striped", .ranks = 2};
  const CheckpointRequest saved{.folder = scratch_.path() + "/saved", .resume = {}};
  const std::vector<std::string> drives{scratch_.path() + "/a", scratch_.path() + "/b"};
  const auto runtimes = connected_runtimes(2, 1);
  expect_none(run_ranks(2, [&](int rank) {
    EngineConfig config = config_of(layout, drives[0]);
    config.store.push_back({drives[1]});
    CheckpointRank its(*runtimes[static_cast<std::size_t>(rank)], layout, config, "");
    its.step();
    its.engine->save_checkpoint(saved);
    its.end();
  }));
  const TensorBytes expected = tensors_of(saved.folder + "/" + checkpoint_name(1));
  OpenStore store(*reading_, drives);
  EXPECT_THAT(differing(store.tensors(), expected), IsEmpty());
  OpenStore other_order(*reading_, {drives[1], drives[0]});
  EXPECT_THAT(differing(other_order.tensors(), expected), IsEmpty());
  EXPECT_THAT(error_of([&] { OpenStore one(*reading_, drives[0]); }).what(),
              HasSubstr("give all directories"));
}

TEST_F(LiveStore, BecomesTheStateOfAnotherNumberOfRanks) {
  const Layout two{.name = "two", .ranks = 2};
  const Layout three{.name = "three", .ranks = 3};
  const CheckpointRequest saved{.folder = scratch_.path() + "/saved", .resume = {}};
  on_ranks(two, scratch_, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 3; ++step) rank.step();
    rank.engine->save_checkpoint(saved);
  });
  const std::string checkpoint = saved.folder + "/" + checkpoint_name(3);
  const CheckpointRequest from_checkpoint{.folder = scratch_.path() + "/a", .resume = {}};
  on_ranks(three, scratch_, checkpoint, [&](CheckpointRank& rank) {
    for (int step = 0; step < 5; ++step) rank.step();
    rank.engine->save_checkpoint(from_checkpoint);
  });
  const CheckpointRequest from_store{.folder = scratch_.path() + "/b", .resume = {}};
  std::filesystem::remove_all(scratch_.path() + "/store-three");
  const auto runtimes = connected_runtimes(3, 1);
  expect_none(run_ranks(3, [&](int r) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(r)];
    OpenStore store(runtime, scratch_.path() + "/store-two");
    CheckpointRank rank(runtime, three, config_of(three, scratch_.path() + "/store-three"),
                        store.state());
    for (int step = 0; step < 5; ++step) rank.step();
    rank.engine->save_checkpoint(from_store);
    rank.end();
  }));
  EXPECT_THAT(differing(tensors_of(from_store.folder + "/" + checkpoint_name(8)),
                        tensors_of(from_checkpoint.folder + "/" + checkpoint_name(8))),
              IsEmpty());
}

}  // namespace stored_state_test
}  // namespace ziggurat::testing
