// SPDX-License-Identifier: Apache-2.0
// tests/aio/io_engine_conformance_test.cc: what every IoEngine promises. Engines: engine_cases.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "tests/aio/engine_cases.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace {

using namespace testing_support;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint32_t kBlock = 4096;

class IoEngineConformance : public ::testing::TestWithParam<EngineCase> {
 protected:
  FileHandle create(const std::string& name, OpenOptions options = {}) {
    options.create = true;
    options.writable = true;
    return engine->open(directory.file(name), options);
  }
  std::vector<std::int32_t> run(std::vector<IoOp> ops) {
    return transfer(reactor, *engine, std::move(ops));
  }

  /// The Error that `action` throws.
  template <class Action>
  Error error_of(Action action) {
    try {
      action();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error";
    return {ErrorCode::kUnimplemented, ""};
  }

  TemporaryDirectory directory;
  Reactor reactor{GetParam().clock};
  MakeEngine make = GetParam().make_world();
  std::unique_ptr<IoEngine> engine = make(reactor);
};

/// What only files of the operating system have: its errors, links, modes, other threads.
class IoEngineOnDisk : public IoEngineConformance {};

TEST_P(IoEngineConformance, ReadsBackWhatWasWrittenAndTouchesNothingElse) {
  const FileHandle file = create("data");
  const std::size_t total = 64 * kBlock;
  AlignedBuffer expected(total), out(total), in(total);
  fill(expected.span(), 1);
  ASSERT_THAT(run({write_op(file, 0, expected.span())}), ElementsAre(static_cast<int>(total)));
  std::uint64_t seed = 2;
  for (const std::size_t blocks : {1, 3, 7, 33}) {
    for (const std::size_t first : {0, 5, 31}) {
      const auto part = out.part(first * kBlock, blocks * kBlock);
      fill(part, seed++);
      std::copy(part.begin(), part.end(),
                expected.span().begin() + static_cast<std::ptrdiff_t>(first * kBlock));
      ASSERT_THAT(run({write_op(file, first * kBlock, part)}),
                  ElementsAre(static_cast<int>(part.size())));
      ASSERT_THAT(run({read_op(file, 0, in.span())}), ElementsAre(static_cast<int>(total)));
      ASSERT_TRUE(same(in.span(), expected.span())) << blocks << " blocks at block " << first;
    }
  }
  engine->close(file);
}

TEST_P(IoEngineConformance, TakesManyMoreTransfersThanTheQueueIsDeep) {
  const FileHandle file = create("data");
  const std::size_t count = 4 * std::size_t{engine->queue_depth()} + 3;
  AlignedBuffer out(count * kBlock), in(count * kBlock);
  fill(out.span(), 3);
  std::vector<IoOp> writes, reads;
  for (std::size_t i = 0; i < count; ++i) {
    writes.push_back(write_op(file, i * kBlock, out.part(i * kBlock, kBlock)));
    reads.push_back(read_op(file, i * kBlock, in.part(i * kBlock, kBlock)));
  }
  Submitted submitted(reactor);
  reactor.block_on(submit_and_wait(*engine, submitted, writes));
  EXPECT_THAT(submitted.results, Each(static_cast<int>(kBlock)));
  EXPECT_EQ(submitted.in_flight_after_submit, count);
  EXPECT_EQ(engine->in_flight(), 0u);
  EXPECT_THAT(run(std::move(reads)), Each(static_cast<int>(kBlock)));
  EXPECT_TRUE(same(in.span(), out.span()));
  engine->close(file);
}

TEST_P(IoEngineConformance, CompletesOnceOnTheReactorsThreadAndNeverInsideSubmit) {
  const FileHandle file = create("data");
  AlignedBuffer memory(8 * kBlock);
  if (GetParam().on_disk) reactor.start();  // on_reactor_thread() is then false for this one
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::vector<IoOp> ops;
    for (std::size_t i = 0; i < 8; ++i)
      ops.push_back(write_op(file, i * kBlock, memory.part(i * kBlock, kBlock)));
    ops.push_back(sync_op(file));
    Submitted submitted(reactor);
    reactor.block_on(submit_and_wait(*engine, submitted, ops));
    EXPECT_FALSE(submitted.inside_submit);
    EXPECT_FALSE(submitted.off_thread);
    EXPECT_FALSE(submitted.twice);
  }
  engine->close(file);
  reactor.stop();
}

TEST_P(IoEngineConformance, SyncReportsZero) {
  const FileHandle file = create("data");
  AlignedBuffer memory(kBlock);
  ASSERT_THAT(run({write_op(file, 0, memory.span())}), ElementsAre(static_cast<int>(kBlock)));
  EXPECT_THAT(run({sync_op(file)}), ElementsAre(0));
  engine->close(file);
}

TEST_P(IoEngineConformance, ReadsAtTheEndAreShortThenZero) {
  const FileHandle file = create("data");
  AlignedBuffer out(3 * kBlock), in(8 * kBlock);
  fill(out.span(), 4);
  ASSERT_THAT(run({write_op(file, 0, out.span())}), ElementsAre(static_cast<int>(3 * kBlock)));
  EXPECT_THAT(run({read_op(file, kBlock, in.span())}), ElementsAre(static_cast<int>(2 * kBlock)));
  EXPECT_TRUE(same(in.part(0, 2 * kBlock), out.part(kBlock, 2 * kBlock)));
  EXPECT_THAT(run({read_op(file, 3 * kBlock, in.span())}), ElementsAre(0));
  EXPECT_THAT(run({read_op(file, 100 * kBlock, in.span())}), ElementsAre(0));
  EXPECT_EQ(engine->file_size_bytes(file), 3u * kBlock);
  engine->close(file);
}

TEST_P(IoEngineOnDisk, FailuresAreReportedVerbatim) {
  engine->close(create("data"));
  OpenOptions read_only;
  const FileHandle file = engine->open(directory.file("data"), read_only);
  AlignedBuffer memory(2 * kBlock);
  EXPECT_THAT(
      run({write_op(file, 0, memory.part(0, kBlock)), read_op(file, 0, memory.part(0, kBlock)),
           write_op(file, 0, memory.part(0, kBlock))}),
      ElementsAre(-EBADF, 0, -EBADF));
  engine->close(file);
}

TEST_P(IoEngineConformance, CreateRefusesAFileThatExistsAndOpenOneThatDoesNot) {
  engine->close(create("data"));
  const Error exists = error_of([&] { create("data"); });
  EXPECT_EQ(exists.native(), EEXIST);
  EXPECT_THAT(exists.what(), HasSubstr(directory.file("data")));
  const Error missing = error_of([&] { engine->open(directory.file("nothing"), {}); });
  EXPECT_EQ(missing.native(), ENOENT);
  EXPECT_EQ(missing.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(missing.what(), HasSubstr(directory.file("nothing")));
}

TEST_P(IoEngineConformance, NamesInADirectoryAreThoseOfFilesAndDirectories) {
  const std::string inner = directory.file("inner");
  engine->make_directory(inner);
  engine->make_directory(inner);
  engine->close(create("b"));
  engine->close(create("a"));
  EXPECT_THAT(engine->names_in(directory.path()), ::testing::IsSupersetOf({"a", "b"}));
  engine->close(create("inner/c"));
  EXPECT_THAT(engine->names_in(directory.path()), ElementsAre("a", "b", "inner"));
  EXPECT_THAT(engine->names_in(inner), ElementsAre("c"));
  EXPECT_EQ(error_of([&] { engine->remove_directory(inner); }).native(), ENOTEMPTY);
  engine->remove(inner + "/c");
  engine->remove_directory(inner);
  EXPECT_THAT(engine->names_in(directory.path()), ElementsAre("a", "b"));
}

TEST_P(IoEngineConformance, RenameReplacesAndRemoveRemoves) {
  const FileHandle old_file = create("new");
  AlignedBuffer memory(kBlock);
  ASSERT_THAT(run({write_op(old_file, 0, memory.span())}), ElementsAre(static_cast<int>(kBlock)));
  engine->close(old_file);
  engine->close(create("store"));
  engine->rename(directory.file("new"), directory.file("store"));
  engine->sync_directory(directory.path());
  EXPECT_FALSE(engine->exists(directory.file("new")));
  EXPECT_TRUE(engine->exists(directory.file("store")));
  const FileHandle file = engine->open(directory.file("store"), {});
  EXPECT_EQ(engine->file_size_bytes(file), kBlock);
  engine->close(file);
  engine->remove(directory.file("store"));
  EXPECT_FALSE(engine->exists(directory.file("store")));
  EXPECT_THAT(
      error_of([&] { engine->rename(directory.file("new"), directory.file("store")); }).what(),
      HasSubstr(directory.file("new")));
  EXPECT_THAT(error_of([&] { engine->remove(directory.file("store")); }).what(),
              HasSubstr(directory.file("store")));
}

TEST_P(IoEngineConformance, AllocateReservesAndSaysWhenThereIsNoRoom) {
  const FileHandle file = create("data");
  engine->allocate(file, 5 * kMiB);
  EXPECT_EQ(engine->file_size_bytes(file), 5 * kMiB);
  const Error error = error_of([&] { engine->allocate(file, std::uint64_t{1} << 50); });
  EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  // A handle on the simulated disk does not know a path.
  if (GetParam().on_disk) {
    EXPECT_THAT(error.what(), HasSubstr(directory.file("data")));
  }
  EXPECT_THAT(error.what(), HasSubstr("free"));
  EXPECT_EQ(engine->file_size_bytes(file), 5 * kMiB);
  engine->close(file);
}

TEST_P(IoEngineConformance, AlignmentIsAPowerOfTwoThatTransfersAccept) {
  const FileHandle file = create("data");
  const DirectAlignment alignment = engine->alignment(file);
  for (const std::uint32_t bytes : {alignment.memory_bytes, alignment.offset_bytes}) {
    EXPECT_GT(bytes, 0u);
    EXPECT_EQ(bytes & (bytes - 1), 0u);
  }
  const std::size_t size = std::max(alignment.offset_bytes, alignment.memory_bytes);
  AlignedBuffer memory(3 * size);
  EXPECT_THAT(run({write_op(file, size, memory.part(size, size))}),
              ElementsAre(static_cast<int>(size)));
  engine->close(file);
}

TEST_P(IoEngineConformance, AnUnnamedFileLeavesNoName) {
  OpenOptions options;
  options.unnamed = true;
  options.writable = true;
  const FileHandle file = engine->open(directory.path(), options);
  AlignedBuffer out(kBlock), in(kBlock);
  fill(out.span(), 5);
  EXPECT_THAT(run({write_op(file, 0, out.span())}), ElementsAre(static_cast<int>(kBlock)));
  EXPECT_THAT(run({read_op(file, 0, in.span())}), ElementsAre(static_cast<int>(kBlock)));
  EXPECT_TRUE(same(in.span(), out.span()));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  engine->close(file);
}

TEST_P(IoEngineConformance, ALockedFileHasOneOwnerUntilItIsClosed) {
  OpenOptions options;
  options.lock = true;
  options.lock_wait = std::chrono::milliseconds(20);
  const FileHandle file = create("data", options);
  AlignedBuffer memory(kBlock);
  ASSERT_THAT(run({write_op(file, 0, memory.span())}), ElementsAre(static_cast<int>(kBlock)));
  const auto other = make(reactor);
  options.writable = true;
  const Error error = error_of([&] { other->open(directory.file("data"), options); });
  EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(error.what(), HasSubstr(directory.file("data")));
  EXPECT_THAT(error.what(), HasSubstr("is in use by"));
  engine->close(file);
  other->close(other->open(directory.file("data"), options));
}

TEST_P(IoEngineConformance, AHandleUsedAgainMeansTheNewFile) {
  AlignedBuffer first(kBlock), second(kBlock), in(kBlock);
  fill(first.span(), 6);
  fill(second.span(), 7);
  const FileHandle old_file = create("first");
  ASSERT_THAT(run({write_op(old_file, 0, first.span())}), ElementsAre(static_cast<int>(kBlock)));
  engine->close(old_file);
  const FileHandle file = create("second");
  ASSERT_THAT(run({write_op(file, 0, second.span())}), ElementsAre(static_cast<int>(kBlock)));
  engine->close(file);
  const FileHandle again = engine->open(directory.file("first"), {});
  ASSERT_THAT(run({read_op(again, 0, in.span())}), ElementsAre(static_cast<int>(kBlock)));
  EXPECT_TRUE(same(in.span(), first.span()));
  engine->close(again);
}

TEST_P(IoEngineConformance, RegisteredMemoryMayBeReplacedAtItsAddress) {
  const FileHandle file = create("data");
  constexpr std::size_t kSize = 2 * kMiB;
  const auto map = [](void* at) {
    return ::mmap(at, kSize, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | (at != nullptr ? MAP_FIXED_NOREPLACE : 0), -1, 0);
  };
  void* const address = map(nullptr);
  ASSERT_NE(address, MAP_FAILED);
  const std::span<std::byte> memory(static_cast<std::byte*>(address), kSize);
  AlignedBuffer in(kSize);
  for (std::uint64_t seed = 10; seed < 13; ++seed) {
    engine->register_memory(memory);
    fill(memory, seed);
    ASSERT_THAT(run({write_op(file, 0, memory)}), ElementsAre(static_cast<int>(kSize)));
    ASSERT_THAT(run({read_op(file, 0, in.span())}), ElementsAre(static_cast<int>(kSize)));
    ASSERT_TRUE(same(in.span(), memory)) << "mapping " << seed;
    ASSERT_EQ(::munmap(address, kSize), 0);
    ASSERT_EQ(map(address), address);
  }
  ASSERT_EQ(::munmap(address, kSize), 0);
  engine->close(file);
}

TEST_P(IoEngineConformance, MemoryMayBeRegisteredInPartOnly) {
  const FileHandle file = create("data");
  AlignedBuffer out(16 * kBlock), in(16 * kBlock);
  fill(out.span(), 8);
  engine->register_memory(out.part(4 * kBlock, 4 * kBlock));
  engine->register_memory(in.part(0, 8 * kBlock));
  for (std::size_t i = 0; i < 14; ++i) {  // inside, outside, and across the border
    ASSERT_THAT(run({write_op(file, i * kBlock, out.part(i * kBlock, 2 * kBlock))}),
                ElementsAre(static_cast<int>(2 * kBlock)));
    ASSERT_THAT(run({read_op(file, i * kBlock, in.part(i * kBlock, 2 * kBlock))}),
                ElementsAre(static_cast<int>(2 * kBlock)));
  }
  EXPECT_TRUE(same(in.part(0, 15 * kBlock), out.part(0, 15 * kBlock)));
  engine->close(file);
}

TEST_P(IoEngineOnDisk, SymbolicLinksAreRefused) {
  engine->close(create("data"));
  ASSERT_EQ(::symlink(directory.file("data").c_str(), directory.file("link").c_str()), 0);
  const Error error = error_of([&] { engine->open(directory.file("link"), {}); });
  EXPECT_EQ(error.native(), ELOOP);
  EXPECT_THAT(error.what(), HasSubstr(directory.file("link")));
  EXPECT_THAT(error.what(), HasSubstr("symbolic link"));
  ASSERT_EQ(::symlink(directory.file("nowhere").c_str(), directory.file("dangling").c_str()), 0);
  EXPECT_EQ(error_of([&] { create("dangling"); }).native(), EEXIST);
  EXPECT_FALSE(engine->exists(directory.file("nowhere")));
}

TEST_P(IoEngineOnDisk, FilesAreRegularAndForTheirOwnerOnlyWhereTheyAreLocked) {
  const auto mode_of = [&](const std::string& name, bool lock) {
    engine->close(
        engine->open(directory.file(name), {.create = true, .writable = true, .lock = lock}));
    struct stat status {};
    EXPECT_EQ(::stat(directory.file(name).c_str(), &status), 0);
    return status.st_mode & 07777u;
  };
  const mode_t usual = ::umask(023);
  EXPECT_EQ(mode_of("data", false), 0644u);
  EXPECT_EQ(mode_of("locked", true), 0600u) << "who may open it may lock it";
  ::umask(usual);
  EXPECT_THAT(error_of([&] { engine->open(directory.path(), {}); }).what(),
              HasSubstr("not a regular file"));
}

TEST_P(IoEngineOnDisk, AnOpenerWaitsForALockThatIsGivenUp) {
  OpenOptions options;
  options.lock = true;
  const FileHandle file = create("data", options);
  std::thread owner([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    engine->close(file);
  });
  Reactor other_reactor;
  const auto other = make(other_reactor);
  other->close(other->open(directory.file("data"), options));
  owner.join();
}

TEST_P(IoEngineOnDisk, ALockIsNotTakenOnAFileThatWasReplacedMeanwhile) {
  OpenOptions options;
  options.lock = true;
  const FileHandle file = create("data", options);
  std::ofstream(directory.file("newer")) << "newer";
  std::thread owner([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    engine->rename(directory.file("newer"), directory.file("data"));
    engine->close(file);
  });
  Reactor other_reactor;
  const auto other = make(other_reactor);
  const FileHandle found = other->open(directory.file("data"), options);
  EXPECT_EQ(other->file_size_bytes(found), 5u);
  other->close(found);
  owner.join();
}

TEST_P(IoEngineOnDisk, AFileClosedOnAnotherThreadIsNotTakenForTheNextOne) {
  reactor.start();
  AlignedBuffer first(kBlock), second(kBlock), in(kBlock);
  fill(first.span(), 6);
  fill(second.span(), 7);
  FileHandle file = create("first");
  ASSERT_THAT(run({write_op(file, 0, first.span())}), ElementsAre(static_cast<int>(kBlock)));
  engine->close(file);  // on this thread, not the reactor's
  file = create("second");
  ASSERT_THAT(run({write_op(file, 0, second.span())}), ElementsAre(static_cast<int>(kBlock)));
  engine->close(file);
  file = engine->open(directory.file("first"), {});
  ASSERT_THAT(run({read_op(file, 0, in.span())}), ElementsAre(static_cast<int>(kBlock)));
  EXPECT_TRUE(same(in.span(), first.span()));
  engine->close(file);
  reactor.stop();
}

// The memory is free again when the engine is gone: nothing may be written into it later.
TEST_P(IoEngineOnDisk, DestructionWaitsForEveryTransfer) {
  for (const bool own_thread : {false, true}) {
    Reactor mine;
    auto doomed = make(mine);
    OpenOptions options;
    options.writable = true;
    options.unnamed = true;
    const FileHandle file = doomed->open(directory.path(), options);
    const std::size_t count = 2 * std::size_t{doomed->queue_depth()};
    constexpr std::size_t kSize = 64 * kKiB;
    AlignedBuffer memory(count * kSize);
    std::vector<IoOp> ops;
    for (std::size_t i = 0; i < count; ++i)
      ops.push_back(write_op(file, i * kSize, memory.part(i * kSize, kSize)));
    Submitted submitted(mine);
    mine.post([&] { submitted.submit(*doomed, std::move(ops)); });
    if (own_thread) {
      mine.start();
      mine.stop();
    } else {
      mine.run_until_idle();
    }
    doomed.reset();
    EXPECT_EQ(submitted.left, 0u);
    EXPECT_FALSE(submitted.twice);
    EXPECT_THAT(submitted.results, Each(::testing::AnyOf(static_cast<int>(kSize), -ECANCELED)));
  }
}

std::vector<EngineCase> cases_on_disk() {
  std::vector<EngineCase> all = engine_cases();
  std::erase_if(all, [](const EngineCase& each) { return !each.on_disk; });
  return all;
}

constexpr auto kName = [](const auto& test) { return test.param.name; };
INSTANTIATE_TEST_SUITE_P(Engines, IoEngineConformance, ::testing::ValuesIn(engine_cases()), kName);
INSTANTIATE_TEST_SUITE_P(Engines, IoEngineOnDisk, ::testing::ValuesIn(cases_on_disk()), kName);

}  // namespace
}  // namespace ziggurat
