// SPDX-License-Identifier: Apache-2.0
// tests/faults/io_fault_campaign_test.cc: every kind of fault at every call to the drive, once and
// from there on, on every engine. No run may end with wrong bytes and no word about it.
//
// For each kind, the n-th call fails, for n = 0, 1, ... until a run ends without having been
// struck: no list of call sites to forget one in.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <map>

#include "base/log.h"
#include "tests/aio/engine_cases.h"
#include "tests/aio/io_testing.h"
#include "tests/faults/fault_jobs.h"
#include "tests/support/sanitized.h"

namespace ziggurat::faults {
namespace {

using testing_support::EngineCase;

constexpr std::uint64_t kCallsMax = 1000;  // a job is much shorter
#ifdef ZIGGURAT_SANITIZES_THREADS
constexpr std::uint64_t kStride = 5;  // every call takes more than an hour
#else
constexpr std::uint64_t kStride = 1;
#endif
#ifdef ZIGGURAT_SANITIZED
constexpr unsigned kRounds = 1;  // half an hour otherwise, for the same lines of code
#else
constexpr unsigned kRounds = 3;
#endif

/// A fault without its place.
struct Kind {
  std::string name;
  Fault fault;
  bool transient = false;  ///< one of it must not be noticed
};

std::vector<Kind> kinds(bool all_errnos) {
  std::vector<Kind> all;
  const auto add_errnos = [&](FaultPoint point, const std::string& where,
                              const std::vector<std::pair<const char*, int>>& errnos) {
    for (const auto& [name, number] : errnos) {
      const bool transfer = point == FaultPoint::kRead || point == FaultPoint::kWrite;
      all.push_back({fmt::format("{} {}", where, name), Fault::fail(point, number),
                     transfer && (number == EAGAIN || number == EINTR)});
    }
  };
  std::vector<std::pair<const char*, int>> transfer_errnos = {{"EIO", EIO},
                                                              {"ENOSPC", ENOSPC},
                                                              {"EAGAIN", EAGAIN},
                                                              {"EINTR", EINTR},
                                                              {"ECANCELED", ECANCELED}};
  if (all_errnos) {
    for (const auto& each : {std::pair{"EDQUOT", EDQUOT},
                             {"EROFS", EROFS},
                             {"ENODEV", ENODEV},
                             {"ETIMEDOUT", ETIMEDOUT},
                             {"EREMOTEIO", EREMOTEIO}}) {
      transfer_errnos.push_back(each);
    }
  }
  for (const auto& [point, where] :
       {std::pair{FaultPoint::kRead, "read"}, {FaultPoint::kWrite, "write"}}) {
    add_errnos(point, where, transfer_errnos);
    all.push_back({fmt::format("{} short", where), Fault::shorten(point, 4096)});
    all.push_back({fmt::format("{} short", where), Fault::shorten(point, 1000)});
    all.push_back({fmt::format("{} zero", where), Fault::zero(point)});
  }
  for (const std::int64_t by : {4096, 65536}) {
    all.push_back({"write misdirected", Fault::misdirect(by)});
  }
  add_errnos(FaultPoint::kSync, "sync", transfer_errnos);
  for (auto point = static_cast<std::size_t>(FaultPoint::kOpen);
       point < static_cast<std::size_t>(FaultPoint::kCount); ++point) {
    add_errnos(static_cast<FaultPoint>(point), "name-level",
               {{"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EACCES", EACCES}, {"EINTR", EINTR}});
  }
  return all;
}

struct Count {
  std::uint64_t placed = 0;   ///< runs that a fault struck
  std::uint64_t strikes = 0;  ///< calls that faults struck
  std::uint64_t survived = 0;
};

class IoFaultCampaign : public ::testing::TestWithParam<EngineCase> {
 protected:
  IoFaultCampaign() { log().set_level(LogLevel::kOff); }  // thousands of runs fail alike

  void run(const Job& job) {
    for (const Kind& kind : kinds(!GetParam().on_disk)) {
      if (kind.fault.effect == Fault::Effect::kMisdirect && !job.knows_its_bytes) continue;
      for (const bool persistent : {false, true}) {
        std::uint64_t call = 0;
        while (strike(job, kind, call, persistent)) {
          call += kStride;
          ASSERT_LT(call, kCallsMax) << "no clean run";
        }
        if (HasFailure()) return;
      }
    }
  }

  /// Whether the job came that far.
  bool strike(const Job& job, const Kind& kind, std::uint64_t call, bool persistent) {
    const FaultPoint point = kind.fault.point;
    const std::uint64_t before = drive.injected(point);
    const Fault planned = kind.fault.at(drive.calls(point) + call);
    drive.plan(persistent ? planned.from_then_on() : planned);
    const Verdict verdict = job.run({reactor, drive, directory.path()});
    const std::uint64_t strikes = drive.injected(point) - before;
    SCOPED_TRACE(fmt::format("{}: {} {} call {} of its point ({})", job.name, kind.name,
                             persistent ? "from" : "at", call, static_cast<int>(point)));
    EXPECT_EQ(verdict.silent, "");
    judge(kind, verdict, persistent, strikes > 0);
    if (strikes == 0) return false;
    Count& count = counts[kind.name];
    ++count.placed;
    count.strikes += strikes;
    if (!verdict.error) ++count.survived;
    return !HasFailure();
  }

  void judge(const Kind& kind, const Verdict& verdict, bool persistent, bool struck) {
    const bool lies = kind.fault.effect == Fault::Effect::kMisdirect;
    const bool must_pass = !struck || (kind.transient && !persistent);
    if (must_pass) {
      EXPECT_FALSE(verdict.error) << verdict.error->what();
    }
    // What was reported as done is there. Only a drive that lied may have lost it, and then the
    // store says so.
    if (verdict.damage) {
      EXPECT_TRUE(lies) << verdict.damage->what();
    }
    // Both copies of a superblock went elsewhere: nothing is left that knows of its generation, and
    // the one before it is whole.
    EXPECT_FALSE(verdict.rolled_back && !(lies && persistent));
    for (const auto& error : {verdict.error, verdict.damage}) {
      if (error) expect_readable(*error, kind, lies);
    }
  }

  void expect_readable(const Error& error, const Kind& kind, bool lies) {
    const std::string text = error.what();
    EXPECT_THAT(text, ::testing::HasSubstr(directory.path())) << "names the path";
    if (lies) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << text;
      return;
    }
    if (kind.fault.effect == Fault::Effect::kErrno) {
      // A store that could read none of its copies sums several up.
      const bool summed_up = error.code() == ErrorCode::kDataLoss && error.native() == 0;
      if (!summed_up) {
        EXPECT_EQ(error.native(), kind.fault.error_number) << text;
      }
      EXPECT_THAT(text, ::testing::HasSubstr(errno_text(kind.fault.error_number)));
    }
    if (kind.fault.point == FaultPoint::kSync) {
      EXPECT_THAT(text, ::testing::HasSubstr("fdatasync"));
    } else if (kind.fault.point < FaultPoint::kSync) {
      EXPECT_THAT(text, ::testing::ContainsRegex("[0-9]+ bytes at offset [0-9]+"));
    }
  }

  void report() const {
    Count total;
    for (const auto& [name, count] : counts) {
      fmt::print("  {:<22} {:>6} placed {:>8} strikes {:>6} survived\n", name, count.placed,
                 count.strikes, count.survived);
      total.placed += count.placed;
      total.strikes += count.strikes;
      total.survived += count.survived;
    }
    fmt::print("  {:<22} {:>6} placed {:>8} strikes {:>6} survived\n", GetParam().name,
               total.placed, total.strikes, total.survived);
  }
  std::uint64_t placed() const {
    std::uint64_t sum = 0;
    for (const auto& [name, count] : counts) sum += count.placed;
    return sum;
  }

  testing_support::TemporaryDirectory directory;
  Reactor reactor{GetParam().clock};
  testing_support::MakeEngine make = GetParam().make_world();  // holds the world
  FaultyEngine drive{reactor, make(reactor)};
  std::map<std::string, Count> counts;
};

TEST_P(IoFaultCampaign, NoFaultIsSilent) {
  // Real engines do a share: what they add is how they submit and complete. The simulated one
  // completes in another order each time.
  const bool real = GetParam().on_disk;
  for (unsigned round = 0; round < (real ? 1 : kRounds); ++round) {
    for (const Job& job : {file_job(), swap_job(), store_job(1)}) run(job);
    if (!real) run(store_job(3));
  }
  report();
  EXPECT_GE(kStride * placed(), real ? 1'000u : kRounds * 3'334u);
}

std::vector<EngineCase> plain_cases() {
  std::vector<EngineCase> all = testing_support::engine_cases();
  std::erase_if(all, [](const EngineCase& each) {
    return each.name.starts_with("faulty") || each.name.starts_with("queued");
  });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Engines, IoFaultCampaign, ::testing::ValuesIn(plain_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ziggurat::faults
