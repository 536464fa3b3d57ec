// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/nccl_ranks_test.cc: ranks over NCCL, each in its process, and what may go
// wrong among them. Whatever a rank does against NCCL's rules ends it with status 86.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/nccl/nccl_device.h"
#include "tests/collectives/nccl/nccl_processes.h"
#include "tests/cuda_double/cuda_double.h"

namespace ziggurat {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

constexpr std::size_t kCount = 60'000;  // elements; bytes of more than one turn of a pipe

std::vector<std::byte> bytes_of(std::size_t n, int seed) {
  std::vector<std::byte> bytes(n);
  for (std::size_t i = 0; i < n; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(seed) * 31);
  }
  return bytes;
}

/// What a step of an engine calls. Errors: kDataLoss if something else than it should came of it.
Task<> step(Communicator& c) {
  const auto world = static_cast<std::size_t>(c.world_size());
  const auto mine = bytes_of(kCount, c.rank());
  std::vector<std::byte> all(kCount * world);
  co_await c.all_gather(mine, all);
  for (std::size_t r = 0; r < world; ++r) {
    const auto expected = bytes_of(kCount, static_cast<int>(r));
    if (std::memcmp(all.data() + r * kCount, expected.data(), kCount) != 0) {
      throw Error(ErrorCode::kDataLoss, "all_gather: wrong bytes");
    }
  }
  std::vector<float> values(kCount * world, static_cast<float>(c.rank() + 1));
  std::vector<float> sum(kCount);
  const auto expected = static_cast<float>(world * (world + 1) / 2);
  co_await c.reduce_scatter(std::as_bytes(std::span(values)),
                            std::as_writable_bytes(std::span(sum)), DType::kFloat32);
  co_await c.all_reduce(std::as_writable_bytes(std::span(values)), DType::kFloat32);
  if (sum != std::vector<float>(sum.size(), expected) ||
      values != std::vector<float>(values.size(), expected)) {
    throw Error(ErrorCode::kDataLoss, "wrong sums");
  }
  std::vector<std::byte> back(all.size());
  co_await c.all_to_all(all, back);
}

void run_steps(NcclRank& rank) {
  rank.run([&] { return step(*rank.all); });
}

void expect_orderly(const std::vector<NcclOutcome>& ranks) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const NcclOutcome& its = ranks[r];
    EXPECT_EQ(its.status, 0) << "rank " << r;
    EXPECT_GT(its.report.joined, 0U) << "rank " << r;
    EXPECT_EQ(its.report.destroyed, its.report.joined) << "rank " << r;
    EXPECT_EQ(its.report.aborted, 0U) << "rank " << r;
    EXPECT_EQ(its.report.living, 0U) << "rank " << r;
    EXPECT_EQ(its.contexts, 1) << "rank " << r << ": another GPU's memory is not its own";
  }
}

TEST(NcclRanks, MakeAStepAndEndInOrder) {
  for (const int world : {2, 3, 4}) {
    const auto ranks = run_nccl_job({.world = world, .body = run_steps});
    for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done");
    expect_orderly(ranks);
  }
}

TEST(NcclRanks, EndInOrderWhicheverCommunicatorAndRankGoesFirst) {
  for (const int late : {0, 1, 2}) {
    const auto ranks =
        run_nccl_job({.world = 3, .body = [late](NcclRank& rank) {
                        auto first = rank.split_of_all();
                        auto second = rank.split_of_all();
                        rank.run([&]() -> Task<> {
                          co_await step(*first);
                          co_await step(*second);
                        });
                        const int own = rank.all->rank();
                        if (own == late)
                          std::this_thread::sleep_for(std::chrono::milliseconds(300));
                        rank.reactor.destroy(own == late ? first : second);
                        rank.reactor.destroy(first);
                        rank.reactor.destroy(second);
                      }});
    for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done") << "late: " << late;
    expect_orderly(ranks);
  }
}

TEST(NcclRanks, AbortWhereTheReactorsThreadEndsTheLastCommunicator) {
  const auto ranks = run_nccl_job({.world = 2, .body = [](NcclRank& rank) {
                                     auto part = rank.split_of_all();
                                     rank.run([&] { return step(*part); });
                                     rank.all.reset();
                                     rank.reactor.destroy(part);
                                   }});
  for (const NcclOutcome& its : ranks) {
    EXPECT_EQ(its.status, 0);
    EXPECT_EQ(its.report.living, 0U);
  }
}

// On one GPU, what one communicator waits for must not wait behind the other.
TEST(NcclRanks, MayCallTwoCommunicatorsInDifferentOrders) {
  const auto ranks = run_nccl_job({.world = 2, .body = [](NcclRank& rank) {
                                     auto first = rank.split_of_all();
                                     auto second = rank.split_of_all();
                                     rank.run([&]() -> Task<> {
                                       const bool even = rank.all->rank() % 2 == 0;
                                       for (int i = 0; i < 20; ++i) {
                                         WorkGroup both(rank.reactor);
                                         both.spawn(step(even ? *first : *second));
                                         both.spawn(step(even ? *second : *first));
                                         co_await both.wait_idle();
                                       }
                                       co_await first->barrier();
                                       co_await second->barrier();
                                     });
                                     rank.reactor.destroy(first);
                                     rank.reactor.destroy(second);
                                   }});
  for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done");
  expect_orderly(ranks);
}

TEST(NcclRanks, HaveJoinedBeforeTheirFirstCallAndShareWhatHasTheSameMembers) {
  const auto ranks = run_nccl_job({.world = 3, .body = [](NcclRank& rank) {
                                     auto first = rank.split_of_all();
                                     auto second = rank.split_of_all();
                                     rank.run([&]() -> Task<> {
                                       std::unique_ptr<Communicator> pair;
                                       std::vector<int> members{0, 2};
                                       if (rank.all->rank() != 1) pair = rank.all->split(members);
                                       co_await rank.all->barrier();
                                     });
                                     rank.reactor.destroy(first);
                                     rank.reactor.destroy(second);
                                   }});
  for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done");
  expect_orderly(ranks);
  EXPECT_EQ(ranks[0].report.joined, 2U);
  EXPECT_EQ(ranks[1].report.joined, 1U);
  EXPECT_EQ(ranks[2].report.joined, 2U);
}

TEST(NcclRanks, TakeOneStageOfDeviceMemoryForAllCommunicators) {
  const auto ranks =
      run_nccl_job({.world = 2, .body = [](NcclRank& rank) {
                      std::vector<std::unique_ptr<Communicator>> parts;
                      for (int i = 0; i < 5; ++i) parts.push_back(rank.split_of_all());
                      rank.run([&]() -> Task<> {
                        for (const auto& part : parts) co_await step(*part);
                      });
                      std::size_t free_bytes = 0;
                      std::size_t all_bytes = 0;
                      cudaSetDevice(rank.all->rank());
                      cudaMemGetInfo(&free_bytes, &all_bytes);
                      rank.say(all_bytes - free_bytes == kNcclStageBytes
                                   ? "one stage"
                                   : fmt::format("{} bytes are taken", all_bytes - free_bytes));
                      for (auto& part : parts) rank.reactor.destroy(part);
                    }});
  for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done\none stage");
}

enum class Home { kHost, kPinned, kDevice };

/// Bytes in host memory, which may be pinned for a GPU, or on it.
class Bytes {
 public:
  Bytes(std::size_t n, Home home, int gpu) : host_(home == Home::kHost ? n : 0), size_(n) {
    if (home == Home::kHost) return;
    cudaSetDevice(gpu);
    const cudaError_t error =
        home == Home::kDevice ? cudaMalloc(&device_, n) : cudaMallocHost(&pinned_, n);
    if (error != cudaSuccess) throw Error(ErrorCode::kResourceExhausted, "no memory of a GPU's");
  }
  ~Bytes() {
    if (device_ != nullptr) cudaFree(device_);
    if (pinned_ != nullptr) cudaFreeHost(pinned_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::span<std::byte> span() {
    return device_ != nullptr ? std::span{static_cast<std::byte*>(device_), size_} : view();
  }
  /// Where the CPU may touch them.
  std::span<std::byte> view() {
    if (pinned_ != nullptr) return {static_cast<std::byte*>(pinned_), size_};
    if (device_ == nullptr) return host_;
    return {cuda_double::device_bytes(device_, size_), size_};
  }
  void fill(int value) { std::ranges::fill(view(), static_cast<std::byte>(value)); }

 private:
  std::vector<std::byte> host_;
  std::size_t size_;
  void* device_ = nullptr;
  void* pinned_ = nullptr;
};

std::vector<float> floats_of(std::span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Every call, on two ranks. Shapes: `in` n bytes, `out` and `back` 2 n. Errors: kDataLoss.
Task<> calls_on(Communicator& c, Bytes& in, Bytes& out, Bytes& back) {
  const auto expect = [](bool right, const char* what) {
    if (!right) throw Error(ErrorCode::kDataLoss, fmt::format("{}: wrong bytes", what));
  };
  const auto all = [](std::span<const std::byte> bytes, int value) {
    return std::ranges::all_of(bytes,
                               [&](std::byte b) { return b == static_cast<std::byte>(value); });
  };
  const std::size_t n = in.span().size();
  in.fill(c.rank() + 1);
  co_await c.all_gather(in.span(), out.span());
  expect(all(out.view().first(n), 1) && all(out.view().last(n), 2), "all_gather");
  out.fill(c.rank() + 5);
  co_await c.all_to_all(out.span(), back.span());
  expect(all(back.view().first(n), 5) && all(back.view().last(n), 6), "all_to_all");
  const auto put = [](std::span<std::byte> bytes, float value) {
    const std::vector<float> values(bytes.size() / sizeof(float), value);
    std::memcpy(bytes.data(), values.data(), bytes.size());
  };
  put(out.view(), c.rank() == 0 ? 0.5F : 3.0F);
  co_await c.reduce_scatter(out.span(), in.span(), DType::kFloat32);
  co_await c.all_reduce(out.span(), DType::kFloat32);
  expect(floats_of(in.view()) == std::vector<float>(n / sizeof(float), 3.5F), "reduce_scatter");
  expect(floats_of(out.view()) == std::vector<float>(2 * n / sizeof(float), 3.5F), "all_reduce");
}

/// Makes every call on this rank's bytes in that memory.
void run_calls(NcclRank& rank, Home home) {
  constexpr std::size_t kBytes = 90'000;
  {
    Bytes in(kBytes, home, rank.all->rank());
    Bytes out(2 * kBytes, home, rank.all->rank());
    Bytes back(2 * kBytes, home, rank.all->rank());
    rank.run([&] { return calls_on(*rank.all, in, out, back); });
  }
  rank.all.reset();
}

// Each rank chose its way by its own memory, and they hung.
TEST(NcclRanks, MayHoldTheirBytesInDifferentKindsOfMemory) {
  for (const int on_gpu : {0, 1, 2}) {  // how many ranks
    const auto ranks =
        run_nccl_job({.world = 2, .body = [on_gpu](NcclRank& rank) {
                        run_calls(rank, rank.all->rank() < on_gpu ? Home::kDevice : Home::kHost);
                      }});
    for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done") << on_gpu;
    expect_orderly(ranks);
  }
}

// A copy from the GPU to pinned memory goes on behind the call that queued it.
TEST(NcclRanks, HaveInPinnedMemoryWhatACallHasBrought) {
  for (const std::string who : {"ranks", "nccl"}) {
    const auto ranks = run_nccl_job({.world = 2,
                                     .body = [](NcclRank& rank) { run_calls(rank, Home::kPinned); },
                                     .reduce = {who, who}});
    for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done") << who;
    expect_orderly(ranks);
  }
}

TEST(NcclRanks, FindTheirGpuWhereEachSeesOne) {
  const auto ranks = run_nccl_job({.world = 2, .body = run_steps, .gpus = {"4", "6"}});
  for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done");
  expect_orderly(ranks);
}

TEST(NcclRanks, RefuseToShareAGpuAndNameBoth) {
  for (const NcclOutcome& its : run_nccl_job({.world = 2, .body = run_steps, .gpus = {"4", "4"}})) {
    EXPECT_THAT(its.text(), AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"),
                                  HasSubstr("0000:3E:00.0"), HasSubstr("a GPU of its own")));
    EXPECT_EQ(its.status, 0);
    EXPECT_EQ(its.report.living, 0U);
  }
}

TEST(NcclRanks, NeedAGpuForEachWhereTheySeeSeveral) {
  for (const NcclOutcome& its :
       run_nccl_job({.world = 3, .body = run_steps, .gpus = {"0,1", "0,1", "0,1"}})) {
    EXPECT_THAT(its.text(), AllOf(HasSubstr("3 ranks"), HasSubstr("2 GPUs")));
    EXPECT_EQ(its.status, 0);
  }
}

TEST(NcclRanks, MustAgreeOnWhoAdds) {
  for (const NcclOutcome& its :
       run_nccl_job({.world = 2, .body = run_steps, .reduce = {"ranks", "nccl"}})) {
    EXPECT_THAT(its.text(), HasSubstr("ZIGGURAT_REDUCE"));
    EXPECT_EQ(its.report.living, 0U);
  }
}

TEST(NcclRanks, LeaveSumsToNcclOnlyWhenTold) {
  for (const std::string who : {"ranks", "nccl"}) {
    const auto ranks = run_nccl_job({.world = 2, .body = run_steps, .reduce = {who, who}});
    for (const NcclOutcome& its : ranks) {
      EXPECT_EQ(its.text(), "done");
      EXPECT_EQ(its.report.sums > 0, who == "nccl");
    }
    expect_orderly(ranks);
  }
}

// Every function of a step, so every place at which a rank may die.
TEST(NcclRanks, NameTheRankThatDiesAndTheCall) {
  for (const char* const fault :
       {"ncclCommInitRankConfig:1:die", "ncclAllGather:1:die", "ncclAllGather:1:late",
        "ncclGroupStart:1:die", "ncclSend:2:die", "ncclRecv:1:die", "ncclGroupEnd:1:die",
        "ncclGroupEnd:1:late", "ncclGroupEnd:2:late", "ncclGroupEnd:3:die", "ncclAllGather:2:late",
        "ncclCommFinalize:1:die"}) {
    const auto ranks = run_nccl_job({.world = 3, .body = run_steps, .faults = {"", fault, ""}});
    for (const std::size_t r : {0u, 2u}) {
      const NcclOutcome& its = ranks[r];
      EXPECT_EQ(its.status, 0) << fault;
      EXPECT_EQ(its.report.living, 0U) << fault;
      if (std::string(fault).find("Finalize") != std::string::npos) continue;
      EXPECT_THAT(its.text(), HasSubstr("rank 1")) << fault;
      EXPECT_THAT(its.text(),
                  AnyOf(HasSubstr(" of 60000 "), HasSubstr(" of 180000 "), HasSubstr("joining")))
          << fault;
      EXPECT_THAT(its.text(), Not(HasSubstr("stood still"))) << fault << ": waited for the timeout";
    }
  }
}

TEST(NcclRanks, EndEverywhereWhenNcclFailsOnOne) {
  for (const char* const fault :
       {"ncclCommInitRankConfig:1:error", "ncclCommInitRankConfig:1:async", "ncclAllGather:1:error",
        "ncclAllGather:1:async", "ncclSend:1:error", "ncclRecv:2:error", "ncclGroupStart:1:error",
        "ncclGroupEnd:1:error", "ncclGroupEnd:1:async", "ncclCommGetAsyncError:9:error"}) {
    const auto ranks = run_nccl_job({.world = 3, .body = run_steps, .faults = {"", fault, ""}});
    for (const NcclOutcome& its : ranks) {
      EXPECT_EQ(its.status, 0) << fault;
      EXPECT_THAT(its.text(), AllOf(HasSubstr("rank 1"), HasSubstr("nccl"))) << fault;
      EXPECT_EQ(its.report.living, 0U) << fault;
      EXPECT_EQ(its.report.aborted, its.report.joined) << fault << ": all of them, once";
    }
  }
}

TEST(NcclRanks, WaitNoLongerThanTheTimeoutForWhatStandsStill) {
  const auto ranks = run_nccl_job({.world = 2,
                                   .body = run_steps,
                                   .faults = {"ncclAllGather:1:hang", ""},
                                   .timeout = std::chrono::seconds(2)});
  for (const NcclOutcome& its : ranks) {
    EXPECT_THAT(its.text(),
                AllOf(HasSubstr("all_gather of 60000 bytes"), HasSubstr("ncclAllGather"),
                      HasSubstr("stood still for the 2.0 s")));
    EXPECT_EQ(its.report.living, 0U);
    EXPECT_EQ(its.status, 0);
  }
}

TEST(NcclRanks, WriteNothingIntoABufferThatACallGaveBack) {
  const auto ranks = run_nccl_job(
      {.world = 3,
       .body =
           [](NcclRank& rank) {
             std::vector<std::byte> all(3 * kCount, std::byte{1});
             const std::vector<std::byte> mine(kCount, std::byte{2});
             rank.run([&] { return rank.all->all_gather(mine, all); });
             std::ranges::fill(all, std::byte{7});
             std::this_thread::sleep_for(std::chrono::milliseconds(300));
             rank.say(std::ranges::all_of(all, [](std::byte b) { return b == std::byte{7}; })
                          ? "kept"
                          : "written");
           },
       .faults = {"", "ncclAllGather:1:late", ""}});
  for (const std::size_t r : {0u, 2u}) {
    ASSERT_FALSE(ranks[r].lines.empty());
    EXPECT_EQ(ranks[r].lines.back(), "kept");
  }
}

// Rank 0 gives turns, also when it has nothing to call any more.
TEST(NcclRanks, MayCallEachOtherWhenRankZeroHasLeft) {
  const auto body = [](NcclRank& rank) {
    std::unique_ptr<Communicator> pair;
    rank.run([&]() -> Task<> {
      std::vector<int> members{1, 2};
      if (rank.all->rank() == 0) co_return;
      pair = rank.all->split(members);
      for (int i = 0; i < 30; ++i) co_await step(*pair);
    });
    if (pair) rank.reactor.destroy(pair);
  };
  // Rank 0 waits all the time that the others' steps take.
  const auto ranks = run_nccl_job({.world = 3, .body = body, .timeout = std::chrono::minutes(4)});
  for (const NcclOutcome& its : ranks) EXPECT_EQ(its.text(), "done");
  expect_orderly(ranks);
}

TEST(NcclRanks, SayWhenOneLeavesWhileOthersCall) {
  for (const int leaves : {0, 1}) {
    const auto ranks = run_nccl_job({.world = 2, .body = [leaves](NcclRank& rank) {
                                       if (rank.all->rank() != leaves) run_steps(rank);
                                     }});
    EXPECT_THAT(ranks[leaves == 0 ? 1 : 0].text(),
                AllOf(HasSubstr(fmt::format("rank {} has left", leaves)),
                      HasSubstr("all_gather of 60000 bytes")));
    for (const NcclOutcome& its : ranks) {
      EXPECT_EQ(its.status, 0);
      EXPECT_EQ(its.report.living, 0U);
    }
  }
}

}  // namespace
}  // namespace ziggurat
