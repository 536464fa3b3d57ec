// SPDX-License-Identifier: Apache-2.0
// tests/aio/uring_engine_test.cc: what only io_uring can do without: locked memory.
#include "aio/uring_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.h"
#include "base/log.h"
#include "tests/aio/io_testing.h"

namespace ziggurat {
namespace {

using namespace testing_support;

constexpr std::size_t kSize = 16 * kMiB;

/// Ends the process: 0 if transfers work although the memory could not be registered and that was
/// said.
[[noreturn]] void write_without_locked_memory(const std::string& directory) {
  const rlimit limit{64 * kKiB, 64 * kKiB};
  if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) std::_Exit(3);
  constexpr uid_t kNobody = 65534;  // root may lock what it likes
  if (::geteuid() == 0 && ::setuid(kNobody) != 0) std::_Exit(4);
  Reactor reactor;
  const auto engine = UringEngine::create(reactor);
  OpenOptions options;
  options.unnamed = true;
  options.writable = true;
  const FileHandle file = engine->open(directory, options);
  AlignedBuffer out(kSize), in(kSize);
  fill(out.span(), 1);
  engine->register_memory(out.span());
  if (degraded_modes().size() != 1) std::_Exit(5);
  const auto results = transfer(reactor, *engine,
                                {write_op(file, 0, out.span()), write_op(file, kSize, out.span())});
  if (results[0] != static_cast<int>(kSize) || results[1] != static_cast<int>(kSize)) std::_Exit(6);
  transfer(reactor, *engine, {read_op(file, 0, in.span())});
  std::_Exit(same(in.span(), out.span()) ? 0 : 7);
}

TEST(UringEngineTest, WithoutLockedMemoryTransfersStillWorkAndTheFixIsNamed) {
  try {
    Reactor reactor;
    static_cast<void>(UringEngine::create(reactor));
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const TemporaryDirectory directory;
  std::filesystem::permissions(directory.path(), std::filesystem::perms::all);
  EXPECT_EXIT(write_without_locked_memory(directory.path()), ::testing::ExitedWithCode(0),
              "cannot register .* with io_uring.*RLIMIT_MEMLOCK is 64.0 KiB.*ulimit -l unlimited");
}

}  // namespace
}  // namespace ziggurat
