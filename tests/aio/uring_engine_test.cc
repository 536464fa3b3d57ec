// SPDX-License-Identifier: Apache-2.0
// tests/aio/uring_engine_test.cc: what only io_uring meets: memory that may not be locked, and a
// kernel whose flag says more than is so.
#include "aio/uring_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>

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

/// The flag of the only ring of this process by which the kernel says that it has work queued for
/// the ring's thread. In a rare race it raises the flag after that work has run.
class WorkFlag {
 public:
  WorkFlag() {
    io_uring_params params{};
    io_uring other;  // the flag is at the same place in each ring
    if (io_uring_queue_init_params(1, &other, &params) != 0) std::abort();
    io_uring_queue_exit(&other);
    size_bytes_ = params.sq_off.array;
    memory_ = ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, ring(),
                     IORING_OFF_SQ_RING);
    if (memory_ == MAP_FAILED) std::abort();
    flags_ = reinterpret_cast<unsigned*>(static_cast<std::byte*>(memory_) + params.sq_off.flags);
  }
  ~WorkFlag() { ::munmap(memory_, size_bytes_); }
  WorkFlag(const WorkFlag&) = delete;

  void raise() { std::atomic_ref(*flags_).fetch_or(IORING_SQ_TASKRUN); }

 private:
  static int ring() {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(entry, gone) == "anon_inode:[io_uring]") {
        return std::stoi(entry.path().filename());
      }
    }
    std::abort();
  }

  std::size_t size_bytes_ = 0;
  void* memory_ = nullptr;
  unsigned* flags_ = nullptr;
};

/// A transfer whose completion raises the flag, after the work that brought it has run.
struct RaisingTransfer {
  Task<> run(IoEngine& engine, IoOp op) {
    op.user = this;
    op.complete = [](IoOp& finished, std::int32_t its_result) {
      auto& self = *static_cast<RaisingTransfer*>(finished.user);
      self.result = its_result;
      self.flag.raise();
      self.done.set();
    };
    engine.submit(op);
    co_await done.wait();
  }

  WorkFlag& flag;
  Signal done;
  std::int32_t result = 0;
};

TEST(UringEngineTest, AFlagThatTheKernelLeavesUpHoldsNothingUp) {
  Reactor reactor;
  std::unique_ptr<IoEngine> engine;
  try {
    engine = UringEngine::create(reactor);
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  if (engine->description().find("DEFER_TASKRUN") == std::string::npos) {
    GTEST_SKIP() << "this kernel queues no work for the thread: " << engine->description();
  }
  const TemporaryDirectory directory;
  OpenOptions options;
  options.unnamed = true;
  options.writable = true;
  const FileHandle file = engine->open(directory.path(), options);
  AlignedBuffer out(kSize);
  WorkFlag flag;
  for (int i = 0; i < 3; ++i) {
    RaisingTransfer transfer{flag, Signal(reactor)};
    reactor.block_on(transfer.run(*engine, write_op(file, 0, out.span())));
    EXPECT_EQ(transfer.result, static_cast<int>(kSize));
  }
}

}  // namespace
}  // namespace ziggurat
