// SPDX-License-Identifier: Apache-2.0
// tests/core/proven_bytes_test.cc: bytes that are read once for all who ask, and kept for a while:
// also where they went, and are read anew, before one who had waited for them comes.
#include "core/checkpoint/proven_bytes.h"

#include <gtest/gtest.h>

#include <utility>

#include "base/error.h"

namespace ziggurat {
namespace proven_bytes_test {

constexpr std::uint64_t kEntryBytes = 4096;

class ProvenBytesTest : public ::testing::Test {
 protected:
  /// `read` of key `key`, until it ends or fails.
  Task<> ask(std::size_t key, ProvenBytes::Read read) {
    try {
      co_await proven_.get({0, key}, {.bytes = kEntryBytes}, read);
    } catch (const Error&) {
      ++failed_;
    }
  }
  void start(Task<> task) {
    reactor_.spawn(std::move(task), [](std::exception_ptr) {});
  }
  ProvenBytes::Read at_once() {
    return [this](std::span<std::byte>) -> Task<> {
      ++reads_;
      co_return;
    };
  }
  ProvenBytes::Read when(Signal& signal) {
    return [this, &signal](std::span<std::byte>) -> Task<> {
      ++reads_;
      co_await signal.wait();
    };
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  AlignedPool memory_;
  ProvenBytes proven_{reactor_, memory_, kEntryBytes};  // room for one
  int reads_ = 0;
  int failed_ = 0;
};

TEST_F(ProvenBytesTest, AreReadOnceHoweverManyAskAndKeptAsLongAsThereIsRoom) {
  Signal read(reactor_);
  start(ask(1, when(read)));
  start(ask(1, when(read)));
  reactor_.run_until_idle();
  read.set();
  reactor_.run_until_idle();
  start(ask(1, at_once()));
  reactor_.run_until_idle();
  EXPECT_EQ(reads_, 1);
  start(ask(2, at_once()));
  start(ask(1, at_once()));
  reactor_.run_until_idle();
  EXPECT_EQ(reads_, 3);
}

// The one who waits is woken when the first read ends; before he comes another key takes the room,
// and the bytes are read anew, which fails.
TEST_F(ProvenBytesTest, ThatAreReadAnewAreNotThoseThatOneHadWaitedFor) {
  Signal first(reactor_);
  Signal again(reactor_);
  const auto reader = [&]() -> Task<> {
    Task<> one = ask(1, when(first));
    co_await std::move(one);
    Task<> another = ask(2, at_once());
    co_await std::move(another);
    Task<> anew = ask(1, when(again));
    co_await std::move(anew);
  };
  start(reader());
  start(ask(1, at_once()));
  reactor_.run_until_idle();
  first.set();
  reactor_.run_until_idle();
  EXPECT_EQ(reads_, 3);
  again.fail(std::make_exception_ptr(Error(ErrorCode::kDataLoss, "damaged")));
  reactor_.run_until_idle();
  EXPECT_EQ(failed_, 1);
  for (std::size_t key = 3; key < 6; ++key) {
    start(ask(key, at_once()));
    reactor_.run_until_idle();
  }
  EXPECT_EQ(reads_, 6);
}

}  // namespace proven_bytes_test
}  // namespace ziggurat
