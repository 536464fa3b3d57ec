// SPDX-License-Identifier: Apache-2.0
// tests/tiers/cuda_loss_test.cc: the loss of a GPU at every call and at every completion of a small
// run, and errors that are no loss, over the double: each wait ends once and says why, nothing is
// called any more, and what the GPU may still write to stays out of use.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "tests/cuda_double/cuda_test.h"
#include "tiers/device/cuda_device.h"
#include "tiers/pool/host_mapping.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using Direction = Stream::Direction;

constexpr std::uint64_t kCapacity = 2 * kMiB;
constexpr std::uint64_t kPiece = 64 * kKiB;

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.what();
  }
}

/// Allocates, copies both ways over two streams that wait for each other and for a trainer's,
/// gives memory back and gets it again, and takes everything down.
class SmallRun {
 public:
  SmallRun() {
    std::ranges::fill(host(0), std::byte{1});
    std::ranges::fill(host(1), std::byte{2});
  }

  /// Everything that was asked for must have been answered.
  void run() {
    attempt([&] {
      device_ = CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kCapacity});
      registration_ = device_->register_host_memory(host_.bytes());
      const auto to_device = device_->create_stream("to device");
      const auto to_host = device_->create_stream("to host");
      const auto caller = device_->caller_stream(nullptr);
      for (int round = 0; round < 2; ++round) use(*to_device, *to_host, *caller);
    });
    reactor_.run_until_idle();
    lost_under_copy_ = registration_ != nullptr && registration_->quarantined(host_.bytes());
    registration_.reset();
    device_.reset();
    reactor_.run_until_idle();
    EXPECT_EQ(asked_, answered_) << "each wait ends once";
  }

  const std::vector<std::string>& errors() const noexcept { return errors_; }
  bool lost_under_copy() const noexcept { return lost_under_copy_; }
  /// After a run without errors.
  void expect_bytes() const {
    EXPECT_EQ(host(2)[0], std::byte{1});
    EXPECT_EQ(host(3)[kPiece - 1], std::byte{2});
  }

 private:
  std::span<std::byte> host(std::size_t piece) const {
    return host_.bytes().subspan(piece * kPiece, kPiece);
  }
  void attempt(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      errors_.emplace_back(error.what());
    }
  }
  std::function<void(std::exception_ptr)> answer() {
    ++asked_;
    return [this](const std::exception_ptr& error) {
      ++answered_;
      if (error) errors_.push_back(what_of(error));
    };
  }
  void wait_for(const Event& event) {
    attempt([&] { reactor_.block_on(event.wait()); });
  }
  void use(Stream& to_device, Stream& to_host, StreamRef& caller) {
    DeviceBuffer a = device_->allocate(kPiece, Purpose::kParams);
    to_device.copy({a.data(), host(0).data(), kPiece, Direction::kToDevice}, answer());
    caller.wait(to_device.record());
    const Event used = caller.record();
    to_host.wait(used);
    to_host.copy({host(2).data(), a.data(), kPiece, Direction::kToHost}, answer());
    a.used_until(used);
    a = DeviceBuffer();
    const DeviceBuffer b = device_->allocate(kPiece, Purpose::kGradients);
    to_device.copy({b.data(), host(1).data(), kPiece, Direction::kToDevice}, answer());
    wait_for(to_device.record());
    to_host.wait(to_device.record());
    to_host.copy({host(3).data(), b.data(), kPiece, Direction::kToHost}, answer());
    wait_for(to_host.record());
  }

  Reactor reactor_;
  const HostMapping host_{{.owner = "test", .size_bytes = 4 * kPiece}};
  std::unique_ptr<CudaDevice> device_;
  std::shared_ptr<HostRegistration> registration_;
  std::vector<std::string> errors_;
  int asked_ = 0;
  int answered_ = 0;
  bool lost_under_copy_ = false;
};

class CudaLoss : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    cuda_double::reset(1);
    SmallRun run;
    run.run();
    EXPECT_THAT(run.errors(), testing::IsEmpty());
    run.expect_bytes();
    EXPECT_THAT(cuda_double::report(), testing::IsEmpty());
    calls_ = cuda_double::calls();
    completions_ = cuda_double::completions();
    EXPECT_GT(calls_, 60u);
    EXPECT_GT(completions_, 8u);
  }
  static void expect_named(const SmallRun& run, cudaError_t error) {
    for (const std::string& text : run.errors()) {
      EXPECT_THAT(text, HasSubstr("cuda"));
      EXPECT_THAT(text, HasSubstr(cudaGetErrorName(error)));
    }
  }

  /// A run for each n up to `count`, in which `inject(n, error)` loses the GPU.
  template <class Inject>
  static void lose_at_each(std::uint64_t count, cudaError_t error, const Inject& inject) {
    for (std::uint64_t n = 1; n <= count; ++n) {
      SCOPED_TRACE(fmt::format("{} at {}", cudaGetErrorName(error), n));
      cuda_double::reset(n);
      inject(n, error);
      SmallRun run;
      run.run();
      expect_named(run, error);
      EXPECT_THAT(cuda_double::take_findings(), testing::IsEmpty());
    }
  }

  static inline std::uint64_t calls_ = 0;
  static inline std::uint64_t completions_ = 0;
};

TEST_F(CudaLoss, errors_of_one_call_at_each_call_in_turn) {
  std::size_t failed_runs = 0;
  for (const cudaError_t error :
       {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorNotSupported}) {
    for (std::uint64_t n = 1; n <= calls_; ++n) {
      SCOPED_TRACE(fmt::format("{} at call {}", cudaGetErrorName(error), n));
      cuda_double::reset(n);
      cuda_double::fail_call(n, error);
      SmallRun run;
      run.run();
      expect_named(run, error);
      failed_runs += run.errors().empty() ? 0 : 1;
      if (run.errors().empty()) run.expect_bytes();
      EXPECT_FALSE(run.lost_under_copy()) << "an error of one call loses no device";
      EXPECT_THAT(cuda_double::take_findings(), testing::IsEmpty());
    }
  }
  EXPECT_GT(failed_runs, calls_) << "most calls matter";
}

TEST_F(CudaLoss, a_lost_gpu_at_each_call_in_turn) {
  for (const cudaError_t error : {cudaErrorECCUncorrectable, cudaErrorIllegalAddress})
    lose_at_each(calls_, error, cuda_double::fail_call);
}

TEST_F(CudaLoss, a_lost_gpu_at_each_completion_in_turn) {
  for (const cudaError_t error : {cudaErrorECCUncorrectable, cudaErrorLaunchFailure})
    lose_at_each(completions_, error, cuda_double::fail_completion);
}

/// Many copies under way when the GPU goes: nothing ends before the test says so.
class CudaLossUnderCopies : public testing::Test {
 protected:
  CudaLossUnderCopies() {
    cuda_double::reset(7, {.pace = cuda_double::Pace::kByHand});
    std::atomic<bool> made = false;
    std::thread clock([&made] {
      while (!made) advance();
    });
    device_ = CudaDevice::create(reactor_, {.index = 0, .capacity_bytes = kCapacity});
    made = true;
    clock.join();
    registration_ = device_->register_host_memory(host_.bytes());
  }
  static void advance() {
    if (const auto next = cuda_double::next_completion()) cuda_double::advance_to(*next);
  }
  ErrorCode code_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("was lost in"));
      return error.code();
    }
    return ErrorCode::kCancelled;
  }

  Reactor reactor_;
  const HostMapping host_{{.owner = "test", .size_bytes = 2 * kMiB}};
  std::unique_ptr<CudaDevice> device_;
  std::shared_ptr<HostRegistration> registration_;
};

TEST_F(CudaLossUnderCopies, every_wait_fails_once_and_nothing_is_called_any_more) {
  DeviceBuffer place = device_->allocate(kMiB, Purpose::kStaging);
  auto in = device_->create_stream("in");
  auto out = device_->create_stream("out");
  auto caller = device_->caller_stream(nullptr);
  std::vector<std::string> errors;
  const auto note = [&errors](const std::exception_ptr& error) {
    errors.push_back(error ? what_of(error) : "no error");
  };
  cuda_double::fail_completion(3, cudaErrorIllegalAddress);
  for (std::size_t i = 0; i < 8; ++i) {
    Stream& stream = i % 2 == 0 ? *in : *out;
    const std::span<std::byte> piece = host_.bytes().subspan(i * kPiece, kPiece);
    if (i % 2 == 0) {
      stream.copy({place.data() + i * kPiece, piece.data(), kPiece, Direction::kToDevice}, note);
    } else {
      stream.copy({piece.data(), place.data() + i * kPiece, kPiece, Direction::kToHost}, note);
    }
  }
  const Event last_in = in->record();
  const Event last_out = out->record();
  while (cuda_double::next_completion()) advance();
  EXPECT_EQ(code_of([&] { reactor_.block_on(last_in.wait()); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { reactor_.block_on(last_out.wait()); }), ErrorCode::kUnavailable);
  reactor_.run_until_idle();
  ASSERT_EQ(errors.size(), 8u);
  const auto failed =
      std::ranges::count_if(errors, [](const std::string& text) { return text != "no error"; });
  EXPECT_GE(failed, 6);
  for (const std::string& text : errors) {
    if (text == "no error") continue;
    EXPECT_THAT(text, HasSubstr("a copy of 64.0 KiB to "));
    EXPECT_THAT(text, HasSubstr("did not finish"));
    EXPECT_THAT(text, HasSubstr("cuda0"));
    EXPECT_THAT(text, HasSubstr("was lost in cuda"));
    EXPECT_THAT(text, HasSubstr("cudaErrorIllegalAddress"));
  }

  const std::uint64_t calls = cuda_double::calls();
  EXPECT_TRUE(registration_->quarantined(host_.bytes().subspan(7 * kPiece, kPiece)));
  EXPECT_FALSE(registration_->quarantined(host_.bytes().subspan(kMiB, kPiece)))
      << "no copy of that was under way";
  EXPECT_EQ(code_of([&] { static_cast<void>(device_->try_allocate(64, Purpose::kStaging)); }),
            ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { in = device_->create_stream("more"); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { static_cast<void>(caller->record()); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] {
              reactor_.block_on(copy(
                  reactor_, *out, {place.data(), host_.bytes().data(), 1, Direction::kToDevice}));
            }),
            ErrorCode::kUnavailable);
  place = DeviceBuffer();
  in.reset();
  out.reset();
  caller.reset();
  registration_.reset();
  reactor_.run_until_idle();
  device_.reset();
  EXPECT_EQ(cuda_double::calls(), calls) << "a call after the loss";
  EXPECT_THAT(cuda_double::take_findings(), testing::IsEmpty());
}

TEST_F(CudaLossUnderCopies, a_device_that_goes_while_nobody_looks_is_found_by_the_next_call) {
  auto stream = device_->create_stream("test");
  const DeviceBuffer place = device_->allocate(kMiB, Purpose::kStaging);
  cuda_double::lose_device(cudaErrorLaunchFailure);
  EXPECT_EQ(
      code_of([&] {
        reactor_.block_on(copy(reactor_, *stream,
                               {place.data(), host_.bytes().data(), kPiece, Direction::kToDevice}));
      }),
      ErrorCode::kUnavailable);
}

TEST_F(CudaLossUnderCopies, a_lease_under_a_copy_is_never_lent_again) {
  auto pool = PinnedPool::create(
      reactor_, {.budget_bytes = 4 * kPiece, .reserves = {}, .use_huge_pages = false});
  pool->keep_registered(device_->register_host_memory(pool->mapping()));
  const auto request = [](std::uint64_t size_bytes) {
    return LeaseRequest{
        .purpose = Purpose::kStaging, .size_bytes = size_bytes, .need = {}, .holder = "test"};
  };
  Lease under = pool->try_acquire(request(kPiece));
  Lease beside = pool->try_acquire(request(kPiece));
  std::byte* const written = under.bytes().data();
  auto stream = device_->create_stream("test");
  DeviceBuffer place = device_->allocate(kPiece, Purpose::kStaging);
  stream->copy({written, place.data(), kPiece, Direction::kToHost},
               [&](const std::exception_ptr& error) {
                 EXPECT_TRUE(error);
                 under.reset();  // as a coroutine does that the error ends
               });
  cuda_double::lose_device(cudaErrorECCUncorrectable);
  stream.reset();
  reactor_.run_until_idle();
  EXPECT_FALSE(under);
  beside.reset();
  EXPECT_EQ(pool->free_bytes(), 3 * kPiece);
  std::vector<Lease> leases;
  while (Lease lease = pool->try_acquire(request(kPiece))) leases.push_back(std::move(lease));
  EXPECT_EQ(leases.size(), 3u);
  for (const Lease& lease : leases) EXPECT_NE(lease.bytes().data(), written);
  leases.clear();
  pool.reset();
  *written = std::byte{1};  // it is still mapped
  place = DeviceBuffer();
  registration_.reset();
  device_.reset();
  EXPECT_THAT(cuda_double::report(), testing::Contains(HasSubstr("still registered")));
}

TEST(CudaStuck, a_wait_that_the_driver_never_ends_ends_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto stuck = [] {
    cuda_double::reset(7, {.pace = cuda_double::Pace::kByHand});
    Reactor reactor;
    const auto device =
        CudaDevice::create(reactor, {.index = 0,
                                     .capacity_bytes = kCapacity,
                                     .deadlines = {.call = std::chrono::milliseconds(200)}});
  };
  EXPECT_EXIT(stuck(), testing::ExitedWithCode(1),
              "cuda0 .*cudaStreamSynchronize has not come back from the driver");
}

}  // namespace
}  // namespace ziggurat
