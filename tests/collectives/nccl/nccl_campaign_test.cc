// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/nccl_campaign_test.cc: each call of NCCL's that a step and its end make,
// on each of 2 to 4 ranks, is the one where the rank dies, or where NCCL fails or stands still.
//
// Every 60th case is tried; ZIGGURAT_FAULTS=all tries each call until one is not made any more.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/runtime/async.h"
#include "tests/collectives/nccl/nccl_processes.h"

namespace ziggurat {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr std::size_t kCount = 60'000;  // bytes; of more than one turn of a pipe
/// For a call that stands still, where one does; a busy machine may need longer for those that run.
constexpr auto kTimeout = std::chrono::seconds(3);
constexpr std::size_t kOneIn = 60;
constexpr std::byte kGivenBack{0x5A};

/// Every call, on buffers that are filled anew when the calls have ended: nothing may come later.
class Buffers {
 public:
  explicit Buffers(std::size_t world) : own_(kCount), all_(kCount * world), back_(kCount * world) {}

  Task<> step(Communicator& c) {
    std::ranges::fill(own_, static_cast<std::byte>(c.rank()));
    co_await c.all_gather(own_, all_);
    co_await c.reduce_scatter(all_, own_, DType::kFloat32);
    co_await c.all_reduce(back_, DType::kFloat32);
    co_await c.all_to_all(all_, back_);
    co_await c.barrier();
  }
  void give_back() {
    for (const auto& buffer : buffers()) std::ranges::fill(*buffer, kGivenBack);
  }
  bool untouched() {
    return std::ranges::all_of(buffers(), [](const auto* buffer) {
      return std::ranges::all_of(*buffer, [](std::byte b) { return b == kGivenBack; });
    });
  }

 private:
  std::array<std::vector<std::byte>*, 3> buffers() { return {&own_, &all_, &back_}; }

  std::vector<std::byte> own_;
  std::vector<std::byte> all_;
  std::vector<std::byte> back_;
};

void step_and_watch(NcclRank& rank) {
  Buffers buffers(static_cast<std::size_t>(rank.all->world_size()));
  rank.run([&] { return buffers.step(*rank.all); });
  buffers.give_back();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  rank.all.reset();
  if (!buffers.untouched()) rank.say("bytes came after the call had ended");
}

struct Fault {
  int world = 2;
  int rank = 0;
  std::string function;
  int nth = 1;
  std::string what;

  std::string text() const { return fmt::format("{}:{}:{}", function, nth, what); }
  bool kills() const { return what == "die" || what == "late"; }
  /// The rank makes it when all of the step's calls have ended, or may.
  bool may_come_last() const {
    return function == "ncclCommFinalize" || function == "ncclCommDestroy" ||
           function == "ncclCommGetAsyncError";
  }
};

void PrintTo(const Fault& fault, std::ostream* out) {
  *out << fmt::format("{} ranks, rank {}: {}", fault.world, fault.rank, fault.text());
}

/// The functions, and what may happen in each.
std::vector<Fault> kinds() {
  std::vector<Fault> all;
  const auto add = [&](const char* function, const std::vector<const char*>& whats) {
    for (const char* const what : whats) all.push_back({.function = function, .what = what});
  };
  for (const char* const function : {"ncclAllGather", "ncclSend", "ncclRecv"})
    add(function, {"die", "late", "error", "async", "hang"});
  add("ncclGroupStart", {"die", "error"});
  add("ncclGroupEnd", {"die", "late", "error", "async", "hang"});
  add("ncclGetUniqueId", {"die", "error"});
  add("ncclCommInitRankConfig", {"die", "error", "async", "hang"});
  add("ncclCommGetAsyncError", {"die", "error", "async"});
  add("ncclCommFinalize", {"die", "error", "hang"});
  add("ncclCommDestroy", {"die", "error"});
  return all;
}

bool went_well(const NcclOutcome& its) {
  return its.status == 0 && its.text() == "done" && its.report.aborted == 0 &&
         its.report.destroyed == its.report.joined;
}

/// A rank that lives says what happened where, and leaves nothing behind.
void expect_told(const Fault& fault, const NcclOutcome& its) {
  EXPECT_EQ(its.status, 0);
  EXPECT_EQ(its.report.living, 0U);
  const std::string text = its.text();
  EXPECT_THAT(text, testing::Not(HasSubstr("bytes came after")));
  EXPECT_THAT(text, testing::Not(HasSubstr("hangs")));
  if (fault.may_come_last() && text == "done") return;
  EXPECT_THAT(text, AnyOf(HasSubstr(" through NCCL"), HasSubstr("joining"), HasSubstr("barrier")));
  if (fault.what == "hang") {
    // The call's own time is over, or that of the ranks that wait behind it.
    EXPECT_THAT(text, AnyOf(HasSubstr("stood still for the 3.0 s"),
                            HasSubstr("stands still: none has finished any work in the 3.0 s")));
  } else {
    EXPECT_THAT(text, HasSubstr(fmt::format("rank {}", fault.rank)));
    EXPECT_THAT(text, fault.kills() ? HasSubstr("rank") : HasSubstr("nccl"));
  }
}

/// Whether the call was made.
bool happens(const Fault& fault) {
  SCOPED_TRACE(testing::PrintToString(fault));
  NcclJob job{.world = fault.world, .body = step_and_watch};
  if (fault.what == "hang") job.timeout = kTimeout;
  job.faults.resize(static_cast<std::size_t>(fault.world));
  job.faults[static_cast<std::size_t>(fault.rank)] = fault.text();
  const std::vector<NcclOutcome> ranks = run_nccl_job(job);
  if (std::ranges::all_of(ranks, went_well)) return false;
  for (int r = 0; r < fault.world; ++r) {
    const NcclOutcome& its = ranks[static_cast<std::size_t>(r)];
    if (fault.kills() && r == fault.rank) {
      EXPECT_TRUE(WIFSIGNALED(its.status) && WTERMSIG(its.status) == SIGKILL) << its.text();
    } else {
      SCOPED_TRACE(fmt::format("of rank {}", r));
      expect_told(fault, its);
    }
  }
  return true;
}

class NcclCampaign : public testing::TestWithParam<int> {};

TEST_P(NcclCampaign, EveryCallIsTheOneThatGoesWrongOnEveryRank) {
  const int world = GetParam();
  const char* const wanted = std::getenv("ZIGGURAT_FAULTS");
  const bool all = wanted != nullptr && std::string_view(wanted) == "all";
  constexpr int kSampledCalls = 3;
  constexpr int kPolls = 12;  // of a state; how often it is asked for is a matter of time
  std::size_t counter = 0;
  std::size_t tried = 0;
  for (int rank = 0; rank < world; ++rank) {
    for (Fault fault : kinds()) {
      fault.world = world;
      fault.rank = rank;
      const bool polls = fault.function == "ncclCommGetAsyncError";
      for (fault.nth = 1; !polls || fault.nth <= kPolls; ++fault.nth) {
        if (!all && fault.nth > kSampledCalls) break;
        if (!all && counter++ % kOneIn != 0) continue;
        ++tried;
        if (!happens(fault) && all) break;
      }
    }
  }
  std::printf("%zu jobs of %d ranks\n", tried, world);
  EXPECT_GT(tried, 0U);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclCampaign, testing::Values(2, 3, 4));

TEST(NcclOrder, RanksThatCallInDifferentOrdersAreToldBothCallsAndNothingReachesNccl) {
  for (const int odd : {0, 1, 2}) {
    const auto ranks = run_nccl_job({.world = 3, .body = [odd](NcclRank& rank) {
                                       Communicator& c = *rank.all;
                                       std::vector<std::byte> own(kCount);
                                       std::vector<std::byte> all(3 * kCount);
                                       std::vector<std::byte> back(3 * kCount);
                                       rank.run([&]() -> Task<> {
                                         if (c.rank() == odd) co_await c.all_to_all(all, back);
                                         co_await c.all_gather(own, all);
                                         if (c.rank() != odd) co_await c.all_to_all(all, back);
                                       });
                                       rank.all.reset();
                                     }});
    for (const NcclOutcome& its : ranks) {
      EXPECT_EQ(its.status, 0);
      EXPECT_THAT(its.text(), HasSubstr("all_gather of 60000 bytes"));
      EXPECT_THAT(its.text(), HasSubstr("all_to_all of 60000 bytes"));
      EXPECT_THAT(its.text(), HasSubstr(fmt::format("rank {}", odd)));
      EXPECT_EQ(its.report.operations, 0U);
      EXPECT_EQ(its.report.living, 0U);
    }
  }
}

}  // namespace
}  // namespace ziggurat
