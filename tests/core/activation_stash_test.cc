// SPDX-License-Identifier: Apache-2.0
// tests/core/activation_stash_test.cc: what was put comes back, whatever memory it was given; its
// memory is never more; a drive that fails loses nothing that is not on it.
#include "core/engine/stash/activation_stash.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "core/engine/state/storage.h"
#include "tests/support/environment_number.h"
#include "tests/support/faults_under.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat::testing {
namespace activation_stash_test {

using ::testing::HasSubstr;

std::vector<std::byte> content(std::uint64_t size_bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

class ActivationStashTest : public ::testing::Test {
 protected:
  ActivationStashTest() { put_faults_under(*runtime_, drive_); }

  void open(std::uint64_t memory_bytes) {
    stash_ = std::make_unique<ActivationStash>(
        *runtime_, std::vector<StoreDirectory>{{.path = folder_.path()}}, memory_bytes);
  }
  ActivationStash::Ticket put(std::uint64_t size_bytes, std::uint64_t seed) {
    return stash_->put(content(size_bytes, seed));
  }
  /// Reads an item.
  std::vector<std::byte> read(ActivationStash::Ticket ticket, std::uint64_t size_bytes) {
    std::vector<std::byte> bytes(size_bytes);
    stash_->read(ticket, {.into = bytes});
    return bytes;
  }
  /// Reads an item and compares it with what was put.
  void expect(ActivationStash::Ticket ticket, std::uint64_t size_bytes, std::uint64_t seed) {
    EXPECT_EQ(read(ticket, size_bytes), content(size_bytes, seed)) << "item " << ticket;
  }
  /// Makes a call that fails, and returns its error.
  template <class Call>
  Error error_of(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error";
    return {ErrorCode::kUnimplemented, "no error"};
  }
  /// Waits until the figures say so.
  template <class Condition>
  void await(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition(stash_->figures())) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "it never came";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void plan(const Fault& fault) {
    on_reactor([&] { drive_->plan(fault); });
  }
  void clear_plan() {
    on_reactor([&] { drive_->clear_plan(); });
  }
  void on_reactor(const std::function<void()>& action) {
    runtime_->reactor.block_on([](const std::function<void()>& its) -> Task<> {
      its();
      co_return;
    }(action));
  }

  ScratchDirectory folder_;
  std::unique_ptr<Runtime> runtime_ =
      Runtime::create({.threads = 2, .pin = false, .trace_path = {}});
  FaultyEngine* drive_ = nullptr;
  std::unique_ptr<ActivationStash> stash_;
};

TEST_F(ActivationStashTest, WhatWasPutComesBackInTheOrderOfAStack) {
  open(kMiB);
  std::vector<ActivationStash::Ticket> tickets;
  constexpr std::uint64_t kItems = 40;
  for (std::uint64_t i = 0; i < kItems; ++i) tickets.push_back(put(100'000 + 5'001 * i, i));
  for (std::uint64_t i = kItems; i-- > 0;) {
    expect(tickets[i], 100'000 + 5'001 * i, i);
    stash_->drop(tickets[i]);
  }
  const StashFigures figures = stash_->figures();
  EXPECT_GT(figures.written_bytes, 6 * kMiB);
  EXPECT_LE(figures.memory_peak_bytes, kMiB);
  EXPECT_GT(figures.brought_ahead_bytes, 0U);
}

TEST_F(ActivationStashTest, WhatFitsIntoThreeQuartersOfMemoryIsNeverWritten) {
  open(4 * kMiB);
  for (std::uint64_t step = 0; step < 5; ++step) {
    std::vector<ActivationStash::Ticket> tickets;
    for (std::uint64_t i = 0; i < 24; ++i) tickets.push_back(put(128 * kKiB, i));
    for (std::uint64_t i = 24; i-- > 0;) {
      expect(tickets[i], 128 * kKiB, i);
      stash_->drop(tickets[i]);
    }
  }
  EXPECT_EQ(stash_->figures().written_bytes, 0U);
  EXPECT_EQ(stash_->figures().read_bytes, 0U);
}

TEST_F(ActivationStashTest, WhatIsBroughtBringsWhatWasPutBefore) {
  open(kMiB);
  std::vector<ActivationStash::Ticket> tickets;
  for (std::uint64_t i = 0; i < 16; ++i) tickets.push_back(put(128 * kKiB, i));
  expect(tickets[15], 128 * kKiB, 15);
  for (std::uint64_t i = 12; i < 16; ++i) stash_->drop(tickets[i]);
  await([](const StashFigures& its) { return its.brought_ahead_bytes > 0; });
}

TEST_F(ActivationStashTest, RandomCallsFindTheBytesThatWerePut) {
  const std::uint64_t calls = number_of("ZIGGURAT_CALLS", 3000);
  open(2 * kMiB);
  struct Known {
    std::uint64_t size_bytes, seed;
  };
  std::map<ActivationStash::Ticket, Known> known;
  struct Lent {
    Stash::Loan loan;
    Known its;
  };
  std::vector<Lent> lent;
  std::mt19937_64 random(7);
  const auto come_back = [&](std::size_t at) {
    const auto [loan, its] = lent[at];
    ASSERT_TRUE(std::ranges::equal(loan.bytes, content(its.size_bytes, its.seed)));
    stash_->give_back(loan.number);
    lent.erase(lent.begin() + static_cast<std::ptrdiff_t>(at));
  };
  for (std::uint64_t call = 0; call < calls; ++call) {
    const auto chosen =
        known.empty()
            ? known.end()
            : std::next(known.begin(), static_cast<std::ptrdiff_t>(random() % known.size()));
    switch (random() % 6) {
      case 4: {
        if (chosen == known.end()) break;
        const Stash::Loan loan = stash_->lend(chosen->first);
        if (loan.number != 0) lent.push_back({.loan = loan, .its = chosen->second});
        break;
      }
      case 5: {
        if (!lent.empty()) come_back(random() % lent.size());
        break;
      }
      case 0:
      case 1: {
        if (known.size() >= 60) break;
        const std::uint64_t size_bytes = 1 + random() % (200 * kKiB);
        known.emplace(put(size_bytes, call), Known{.size_bytes = size_bytes, .seed = call});
        break;
      }
      case 2: {
        if (chosen == known.end()) break;
        const auto [size_bytes, seed] = chosen->second;
        const std::uint64_t begin = random() % (size_bytes + 1);
        std::vector<std::byte> part(random() % (size_bytes - begin + 1));
        stash_->read(chosen->first, {.offset_bytes = begin, .into = part});
        const std::vector<std::byte> all = content(size_bytes, seed);
        ASSERT_TRUE(std::ranges::equal(part, std::span(all).subspan(begin, part.size())))
            << "call " << call;
        break;
      }
      default: {
        if (chosen == known.end()) break;
        stash_->drop(chosen->first);
        known.erase(chosen);
      }
    }
  }
  while (!lent.empty()) come_back(0);
  EXPECT_GT(stash_->figures().written_bytes, 0U);
  EXPECT_GT(stash_->figures().lent_bytes, 2 * kMiB);
  EXPECT_LE(stash_->figures().memory_peak_bytes, 2 * kMiB);
}

TEST_F(ActivationStashTest, AnItemThatIsDroppedWhileItIsReadIsReadWhole) {
  open(kMiB);
  const ActivationStash::Ticket ticket = put(512 * kKiB, 1);
  for (std::uint64_t i = 0; i < 8; ++i) put(512 * kKiB, 2 + i);
  plan(Fault::slow(FaultPoint::kRead, std::chrono::milliseconds(50)).from_then_on());
  {
    const std::jthread reader([&] { expect(ticket, 512 * kKiB, 1); });
    std::uint64_t asked = 0;
    while (asked == 0) on_reactor([&] { asked = drive_->calls(FaultPoint::kRead); });
    stash_->drop(ticket);
  }
  const Error error = error_of([&] { read(ticket, 512 * kKiB); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("was dropped, or never put"));
}

TEST_F(ActivationStashTest, RefusesWhatMemoryCannotHoldAndGoesOn) {
  open(kMiB);
  const ActivationStash::Ticket kept = put(600 * kKiB, 1);
  const Error large = error_of([&] { put(kMiB + 1, 2); });
  EXPECT_EQ(large.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(large.what(), HasSubstr("does not fit the stash's memory of 1.0 MiB"));
  const ActivationStash::Ticket next = put(600 * kKiB, 4);
  expect(next, 600 * kKiB, 4);
  expect(kept, 600 * kKiB, 1);
}

TEST_F(ActivationStashTest, RefusesAPartThatTheItemDoesNotHave) {
  open(kMiB);
  const ActivationStash::Ticket ticket = put(1000, 1);
  std::vector<std::byte> part(10);
  for (const std::uint64_t offset : {std::uint64_t{991}, std::uint64_t{1001}, ~std::uint64_t{0}}) {
    const Error error =
        error_of([&] { stash_->read(ticket, {.offset_bytes = offset, .into = part}); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("has 1000 bytes"));
  }
  for (std::uint64_t i = 0; i < 8; ++i) put(kMiB, 2 + i);  // what was refused is in nobody's use
  expect(ticket, 1000, 1);
}

TEST_F(ActivationStashTest, AFullDriveIsNamedAndLosesNothing) {
  open(kMiB);
  plan(Fault::fail(FaultPoint::kWrite, ENOSPC).from_then_on());
  std::map<ActivationStash::Ticket, std::uint64_t> there;
  const Error error = error_of([&] {
    for (std::uint64_t i = 0; i < 100; ++i) there.emplace(put(100 * kKiB, i), i);
  });
  EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error.what(), HasSubstr(folder_.path()));
  EXPECT_FALSE(there.empty());
  for (const auto& [ticket, seed] : there) expect(ticket, 100 * kKiB, seed);
  clear_plan();
  for (std::uint64_t i = 100; i < 140; ++i) there.emplace(put(100 * kKiB, i), i);
  for (const auto& [ticket, seed] : there) expect(ticket, 100 * kKiB, seed);
}

TEST_F(ActivationStashTest, AReadThatFailsIsToldToWhoNeedsTheItem) {
  open(kMiB);
  std::vector<ActivationStash::Ticket> tickets;
  for (std::uint64_t i = 0; i < 40; ++i) tickets.push_back(put(100 * kKiB, i));
  plan(Fault::fail(FaultPoint::kRead, EIO).from_then_on());
  const Error error = error_of([&] { read(tickets[0], 100 * kKiB); });
  EXPECT_EQ(error.native(), EIO);
  EXPECT_THAT(error.what(), HasSubstr(folder_.path()));
  clear_plan();
  for (std::uint64_t i = 40; i-- > 0;) expect(tickets[i], 100 * kKiB, i);
}

TEST_F(ActivationStashTest, BytesThatTheDriveDidNotReturnAreNeverUsed) {
  open(kMiB);
  plan(Fault::misdirect(64 * static_cast<std::int64_t>(kMiB)).at(2));
  std::vector<ActivationStash::Ticket> tickets;
  for (std::uint64_t i = 0; i < 40; ++i) tickets.push_back(put(100 * kKiB, i));
  std::uint64_t lost = 0;
  for (std::uint64_t i = 40; i-- > 0;) {
    try {
      expect(tickets[i], 100 * kKiB, i);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
      EXPECT_THAT(error.what(), HasSubstr("wrong checksum"));
      ++lost;
    }
  }
  EXPECT_EQ(lost, 1U);
}

TEST_F(ActivationStashTest, DropsAndClosesWhileTransfersAreUnderWay) {
  open(kMiB);
  plan(Fault::slow(FaultPoint::kWrite, std::chrono::milliseconds(20)).from_then_on());
  plan(Fault::slow(FaultPoint::kRead, std::chrono::milliseconds(20)).from_then_on());
  std::vector<ActivationStash::Ticket> tickets;
  for (std::uint64_t i = 0; i < 30; ++i) {
    tickets.push_back(put(100 * kKiB, i));
    if (i % 3 == 0) stash_->drop(tickets.back());
  }
  expect(tickets[1], 100 * kKiB, 1);
  for (std::uint64_t i = 10; i < 30; ++i) stash_->drop(tickets[i]);
  stash_.reset();
}

/// The parameter is the size of an item.
class ActivationStashThreads : public ActivationStashTest,
                               public ::testing::WithParamInterface<std::uint64_t> {};

TEST_P(ActivationStashThreads, PutAndReadWithLittleRoom) {
  constexpr std::uint64_t kItems = 6;
  const std::uint64_t size_bytes = GetParam();
  open(2 * kMiB);
  std::atomic<int> wrong = 0;
  std::vector<std::jthread> threads;
  for (std::uint64_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      try {
        for (std::uint64_t step = 0; step < 20; ++step) {
          std::vector<ActivationStash::Ticket> tickets;
          const auto seed = [&](std::uint64_t i) { return thread * 1'000 + step * 20 + i; };
          for (std::uint64_t i = 0; i < kItems; ++i) tickets.push_back(put(size_bytes, seed(i)));
          for (std::uint64_t i = kItems; i-- > 0;) {
            if (read(tickets[i], size_bytes) != content(size_bytes, seed(i))) ++wrong;
            stash_->drop(tickets[i]);
          }
        }
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, ActivationStashThreads,
                         ::testing::Values(90 * kKiB, kMiB + 4096, 2 * kMiB));

TEST_F(ActivationStashTest, LendsUpToHalfOfItsMemory) {
  open(kMiB);
  std::vector<ActivationStash::Ticket> tickets;
  for (std::uint64_t i = 0; i < 16; ++i) tickets.push_back(put(128 * kKiB, i));
  std::vector<std::uint64_t> loans;
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Stash::Loan loan = stash_->lend(tickets[i]);
    ASSERT_NE(loan.number, 0U);
    EXPECT_TRUE(std::ranges::equal(loan.bytes, content(128 * kKiB, i))) << "item " << i;
    loans.push_back(loan.number);
  }
  EXPECT_EQ(stash_->lend(tickets[4]).number, 0U);
  EXPECT_EQ(stash_->lend(tickets[0]).number, 0U);  // also what is lent already
  EXPECT_EQ(stash_->figures().lent_bytes, 512 * kKiB);
  stash_->give_back(loans[2]);
  stash_->give_back(loans[2]);  // changes nothing
  const Stash::Loan next = stash_->lend(tickets[4]);
  EXPECT_TRUE(std::ranges::equal(next.bytes, content(128 * kKiB, 4)));
  EXPECT_EQ(stash_->lend(tickets[5]).number, 0U);
  for (std::uint64_t i = 16; i-- > 0;) expect(tickets[i], 128 * kKiB, i);
  EXPECT_LE(stash_->figures().memory_peak_bytes, kMiB);
}

TEST_F(ActivationStashTest, WhatIsLentStaysUntilItComesBackAlsoIfItIsDropped) {
  open(kMiB);
  const ActivationStash::Ticket first = put(256 * kKiB, 1);
  const Stash::Loan one = stash_->lend(first), other = stash_->lend(first);
  ASSERT_NE(other.number, 0U);
  stash_->drop(first);
  stash_->give_back(one.number);
  std::map<ActivationStash::Ticket, std::uint64_t> there;
  for (std::uint64_t i = 2; i < 30; ++i) there.emplace(put(200 * kKiB, i), i);
  EXPECT_TRUE(std::ranges::equal(other.bytes, content(256 * kKiB, 1)));
  stash_->give_back(other.number);
  const ActivationStash::Ticket whole = put(kMiB, 30);  // needs all of the memory
  expect(whole, kMiB, 30);
  for (const auto& [ticket, seed] : there) expect(ticket, 200 * kKiB, seed);
}

TEST_F(ActivationStashTest, NobodyWaitsForWhatIsLent) {
  open(kMiB);
  const ActivationStash::Ticket away = put(900 * kKiB, 1), lent = put(500 * kKiB, 2);
  const Stash::Loan loan = stash_->lend(lent);
  ASSERT_NE(loan.number, 0U);
  EXPECT_EQ(stash_->take(900 * kKiB).ticket, 0U);
  const Error error = error_of([&] { put(900 * kKiB, 3); });
  EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error.what(), HasSubstr("is lent"));
  expect(away, 900 * kKiB, 1);  // beyond the budget
  stash_->drop(away);
  stash_->give_back(loan.number);
  expect(put(900 * kKiB, 4), 900 * kKiB, 4);
  EXPECT_LE(stash_->figures().memory_peak_bytes, kMiB);
}

// Who waits for room hears it too when a reader leaves an item that is lent besides: then nothing
// more comes by itself.
TEST_F(ActivationStashTest, WhoWaitsForAReaderOfWhatIsLentGoesOn) {
  open(kMiB);
  std::unique_ptr<Storage> storage;
  std::unique_ptr<Stash> stash;
  Stash::Ticket item = 0;
  std::uint64_t loan = 0;
  on_reactor([&] {
    storage = Storage::open(*runtime_, *runtime_->ranks, {{.path = folder_.path()}});
    stash = std::make_unique<Stash>(runtime_->reactor, runtime_->jobs(), kMiB, storage->places);
  });
  item = runtime_->reactor.block_on(stash->put(400 * kKiB)).ticket;
  on_reactor([&] { stash->filled(item); });
  loan = runtime_->reactor.block_on(stash->lend(item)).number;
  EXPECT_NE(loan, 0U);
  runtime_->reactor.block_on(stash->bring(item));
  Stash::Room room;
  std::atomic<bool> ended = false;
  std::jthread waits([&] {
    room = runtime_->reactor.block_on(stash->put(900 * kKiB));
    ended = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(ended) << "the reader may be about to leave the item";
  on_reactor([&] { stash->release(item); });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!ended && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(ended) << "it waits for a loan to come back";
  on_reactor([&] { stash->give_back(loan); });
  waits.join();
  EXPECT_EQ(room.ticket, 0U);
  runtime_->reactor.block_on(stash->settle());
  on_reactor([&] {
    stash.reset();
    storage.reset();
  });
}

TEST_F(ActivationStashTest, ClosesWithWhatIsLentAndBeyondTheBudget) {
  open(kMiB);
  const ActivationStash::Ticket away = put(900 * kKiB, 1), lent = put(500 * kKiB, 2);
  ASSERT_NE(stash_->lend(lent).number, 0U);
  expect(away, 900 * kKiB, 1);
  stash_.reset();
}

TEST_F(ActivationStashTest, WhatIsBeingWrittenIsNotLent) {
  open(kMiB);
  plan(Fault::slow(FaultPoint::kWrite, std::chrono::milliseconds(100)).from_then_on());
  const ActivationStash::Ticket first = put(400 * kKiB, 1);
  put(400 * kKiB, 2);  // has the first one written
  std::uint64_t asked = 0;
  while (asked == 0) on_reactor([&] { asked = drive_->calls(FaultPoint::kWrite); });
  const Stash::Loan loan = stash_->lend(first);
  if (stash_->figures().written_bytes == 0) {
    EXPECT_EQ(loan.number, 0U);
  }
  expect(first, 400 * kKiB, 1);
}

TEST_F(ActivationStashTest, WhatNobodyFillsIsForgotten) {
  open(kMiB);
  for (int turn = 0; turn < 3; ++turn) {
    const Stash::Room room = stash_->take(kMiB);
    EXPECT_EQ(room.bytes.size(), kMiB);
    const Error error = error_of([&] { read(room.ticket, 1); });
    EXPECT_THAT(error.what(), HasSubstr("was dropped, or never put"));
    stash_->drop(room.ticket);
    stash_->filled(room.ticket);  // too late, which changes nothing
  }
  expect(put(kMiB, 1), kMiB, 1);
}

TEST_F(ActivationStashTest, ADriveThatGivesNothingIsAskedAheadOnce) {
  open(kMiB);
  std::vector<ActivationStash::Ticket> tickets;
  for (std::uint64_t i = 0; i < 40; ++i) tickets.push_back(put(100 * kKiB, i));
  plan(Fault::fail(FaultPoint::kRead, EIO).from_then_on());
  expect(tickets[39], 100 * kKiB, 39);
  for (std::uint64_t i = 34; i < 40; ++i) stash_->drop(tickets[i]);
  std::uint64_t asked = 0;
  for (int turn = 0; turn < 20; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    on_reactor([&] { asked = drive_->calls(FaultPoint::kRead); });
  }
  EXPECT_LE(asked, 40U);
  clear_plan();
  for (std::uint64_t i = 34; i-- > 0;) expect(tickets[i], 100 * kKiB, i);
}

TEST_F(ActivationStashTest, NeedsADirectoryAndMemory) {
  const Error nowhere = error_of([&] { ActivationStash(*runtime_, {}, kMiB); });
  EXPECT_EQ(nowhere.code(), ErrorCode::kInvalidArgument);
  const Error nothing = error_of([&] { open(100); });
  EXPECT_EQ(nothing.code(), ErrorCode::kInvalidArgument);
}

}  // namespace activation_stash_test
}  // namespace ziggurat::testing
