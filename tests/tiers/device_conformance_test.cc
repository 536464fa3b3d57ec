// SPDX-License-Identifier: Apache-2.0
// tests/tiers/device_conformance_test.cc: what every Device promises, run on the host-emulated one
// and on the CUDA one.
//
// A stream is held by a host function queued on it (each implementation's enqueue), so that overlap
// is shown by what completes while another stream cannot, without a look at the clock.
#include <gmock/gmock.h>

#include <future>
#include <latch>
#include <random>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "tiers/cuda_device.h"
#include "tiers/host_device.h"
#include "tiers/host_mapping.h"

namespace ziggurat {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kCapacity = 12 * kMiB;
using Direction = Stream::Direction;

struct HostTraits {
  static std::unique_ptr<HostDevice> create(Reactor& reactor, Metrics& metrics) {
    return HostDevice::create(reactor, kCapacity, nullptr, &metrics);
  }
  static void enqueue(HostDevice&, Stream& stream, std::function<void()> action) {
    dynamic_cast<HostStream&>(stream).enqueue(std::move(action));
  }
  static std::string why_none() { return {}; }
};

struct CudaTraits {
  static std::unique_ptr<CudaDevice> create(Reactor& reactor, Metrics& metrics) {
    return CudaDevice::create(
        reactor, {.index = 0, .capacity_bytes = kCapacity, .trace = nullptr, .metrics = &metrics});
  }
  static void enqueue(CudaDevice& device, Stream& stream, std::function<void()> action) {
    device.enqueue(stream, std::move(action));
  }
  static std::string why_none() { return cuda_devices().why_none; }
};

std::vector<std::byte> pattern(std::size_t size_bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

template <class Traits>
class DeviceConformance : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Traits::why_none(); !why.empty())
      GTEST_SKIP() << "no such device: " << why;
    device_ = Traits::create(reactor_, metrics_);
  }
  void copy_now(Stream& stream, const Stream::Copy& request) {
    reactor_.block_on(copy(reactor_, stream, request));
  }
  /// Keeps `stream` from going on until the result is set.
  std::promise<void> hold(Stream& stream) {
    std::promise<void> release;
    Traits::enqueue(*device_, stream, [held = release.get_future().share()] { held.wait(); });
    return release;
  }
  std::vector<std::byte> read_back(Stream& stream, const DeviceBuffer& buffer) {
    std::vector<std::byte> bytes(buffer.size_bytes());
    copy_now(stream, {bytes.data(), buffer.data(), bytes.size(), Direction::kToHost});
    return bytes;
  }

  Reactor reactor_;
  Metrics metrics_;
  decltype(Traits::create(reactor_, metrics_)) device_;
};

using Devices = testing::Types<HostTraits, CudaTraits>;
struct Names {
  template <class T>
  static std::string GetName(int) {
    return std::is_same_v<T, HostTraits> ? "host" : "cuda";
  }
};
TYPED_TEST_SUITE(DeviceConformance, Devices, Names);

TYPED_TEST(DeviceConformance, the_budget_is_hard_and_the_error_has_the_account) {
  Device& device = *this->device_;
  const DeviceBuffer params = device.allocate(9 * kMiB, Purpose::kParams);
  try {
    const DeviceBuffer more = device.allocate(4 * kMiB, Purpose::kGradients);
    FAIL() << "13 MiB of 12 were given";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), HasSubstr("4.0 MiB for gradients"));
    EXPECT_THAT(error.what(), HasSubstr("too few"));
    EXPECT_THAT(error.what(), HasSubstr("params 9.0 MiB of 12.0 MiB"));
  }
  EXPECT_FALSE(device.try_allocate(4 * kMiB, Purpose::kGradients));
  EXPECT_FALSE(device.try_allocate(~std::uint64_t{0}, Purpose::kGradients));
  EXPECT_EQ(device.account().used_bytes(Purpose::kGradients), 0u) << "nothing changed";
}

TYPED_TEST(DeviceConformance, all_of_the_budget_can_be_had_and_freed_memory_again) {
  Device& device = *this->device_;
  int freed = 0;
  device.on_free([&freed] { ++freed; });
  for (int round = 0; round < 3; ++round) {
    const DeviceBuffer whole = device.allocate(kCapacity, Purpose::kParams);
    EXPECT_FALSE(device.try_allocate(1, Purpose::kParams));
  }
  EXPECT_EQ(freed, 3);
  DeviceBuffer a = device.allocate(kMiB, Purpose::kParams);
  DeviceBuffer b = device.allocate(kMiB, Purpose::kGradients);
  a = std::move(b);
  EXPECT_EQ(device.account().used_bytes(Purpose::kParams), 0u);
  a = DeviceBuffer();
  EXPECT_EQ(device.account().used_bytes(), 0u);
  EXPECT_EQ(device.account().peak_bytes(), kCapacity);
}

TYPED_TEST(DeviceConformance, buffers_are_aligned_and_do_not_overlap) {
  Device& device = *this->device_;
  std::vector<DeviceBuffer> buffers;
  for (const std::uint64_t size : {1ull, 63ull, 4097ull, 300000ull, 64ull, 1000000ull}) {
    buffers.push_back(device.allocate(size, Purpose::kActivations));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffers.back().data()) % 64, 0u);
    EXPECT_EQ(buffers.back().size_bytes(), size);
  }
  for (const DeviceBuffer& a : buffers) {
    for (const DeviceBuffer& b : buffers) {
      if (&a == &b) continue;
      EXPECT_TRUE(a.data() + a.size_bytes() <= b.data() || b.data() + b.size_bytes() <= a.data());
    }
  }
}

TYPED_TEST(DeviceConformance, bytes_arrive_for_odd_sizes_and_offsets) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer there = this->device_->allocate(5 * kMiB, Purpose::kStaging);
  const DeviceBuffer beside = this->device_->allocate(5 * kMiB, Purpose::kStaging);
  for (const std::size_t size :
       {0u, 1u, 2u, 63u, 65u, 4095u, 4097u, 1048577u, 4194304u, 5242879u}) {
    for (const std::size_t offset : {0u, 1u}) {
      const auto source = pattern(size + offset, static_cast<unsigned>(size));
      std::vector<std::byte> back(size + offset + 1, std::byte{0x5a});
      this->copy_now(*stream,
                     {there.data() + offset, source.data() + offset, size, Direction::kToDevice});
      this->copy_now(*stream, {beside.data(), there.data() + offset, size, Direction::kOnDevice});
      this->copy_now(*stream, {back.data() + offset, beside.data(), size, Direction::kToHost});
      EXPECT_TRUE(std::equal(source.begin() + static_cast<std::ptrdiff_t>(offset), source.end(),
                             back.begin() + static_cast<std::ptrdiff_t>(offset)))
          << size;
      EXPECT_EQ(back.back(), std::byte{0x5a}) << "a byte too many";
    }
  }
}

TYPED_TEST(DeviceConformance, a_stream_keeps_its_order) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  std::vector<std::vector<std::byte>> sources;
  for (unsigned i = 0; i < 8; ++i) sources.push_back(pattern(kMiB, i));
  std::vector<unsigned> order;
  std::promise<void> release = this->hold(*stream);
  for (unsigned i = 0; i < 8; ++i) {
    stream->copy({place.data(), sources[i].data(), kMiB, Direction::kToDevice},
                 [&order, i](std::exception_ptr error) {
                   EXPECT_FALSE(error);
                   order.push_back(i);
                 });
  }
  release.set_value();
  EXPECT_EQ(this->read_back(*stream, place), sources.back()) << "the last copy wins";
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TYPED_TEST(DeviceConformance, streams_go_on_while_another_is_held) {
  const auto held = this->device_->create_stream("held");
  const auto free = this->device_->create_stream("free");
  const DeviceBuffer a = this->device_->allocate(kMiB, Purpose::kStaging);
  const DeviceBuffer b = this->device_->allocate(kMiB, Purpose::kStaging);
  const auto source = pattern(kMiB, 1);
  Signal finished(this->reactor_);
  std::promise<void> release = this->hold(*held);
  held->copy({a.data(), source.data(), kMiB, Direction::kToDevice},
             [&](std::exception_ptr) { finished.set(); });
  this->copy_now(*free, {b.data(), source.data(), kMiB, Direction::kToDevice});
  EXPECT_EQ(this->read_back(*free, b), source);
  EXPECT_FALSE(finished.is_set());
  release.set_value();
  this->reactor_.block_on(finished.wait());
  EXPECT_EQ(this->read_back(*free, a), source);
}

TYPED_TEST(DeviceConformance, completions_come_on_the_reactors_thread) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(64, Purpose::kStaging);
  const auto source = pattern(64, 1);
  this->reactor_.start();
  Signal finished(this->reactor_);
  bool on_reactor = false;
  const auto body = [&]() -> Task<> {
    const std::function<void(std::exception_ptr)> done = [&](std::exception_ptr) {
      on_reactor = this->reactor_.on_reactor_thread();
      finished.set();
    };
    stream->copy({place.data(), source.data(), 64, Direction::kToDevice}, done);
    co_await finished.wait();
  };
  this->reactor_.block_on(body());
  EXPECT_TRUE(on_reactor);
  this->reactor_.stop();
}

TYPED_TEST(DeviceConformance, a_copy_outside_device_memory_fails_and_the_stream_with_it) {
  const auto broken = this->device_->create_stream("broken");
  const auto other = this->device_->create_stream("other");
  const DeviceBuffer place = this->device_->allocate(kCapacity, Purpose::kStaging);
  std::vector<std::byte> host(kMiB);
  const auto code_of = [&](const Stream::Copy& request) {
    try {
      this->copy_now(*broken, request);
    } catch (const Error& error) {
      return error.code();
    }
    ADD_FAILURE() << "no error";
    return ErrorCode::kCancelled;
  };
  std::byte* past = place.data() + kCapacity - kMiB + 1;
  EXPECT_EQ(code_of({past, host.data(), kMiB, Direction::kToDevice}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of({place.data(), host.data(), 1, Direction::kToDevice}),
            ErrorCode::kInvalidArgument)
      << "what came after it on the stream may depend on it";
  EXPECT_NO_THROW(this->copy_now(*other, {place.data(), host.data(), kMiB, Direction::kToDevice}));
}

TYPED_TEST(DeviceConformance, bytes_are_counted_by_link) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  std::vector<std::byte> host(kMiB);
  this->copy_now(*stream, {place.data(), host.data(), 1000, Direction::kToDevice});
  this->copy_now(*stream, {host.data(), place.data(), 300, Direction::kToHost});
  this->copy_now(*stream, {place.data() + 500, place.data(), 400, Direction::kOnDevice});
  EXPECT_EQ(this->metrics_.value(Counter::kHostToDeviceBytes), 1000u);
  EXPECT_EQ(this->metrics_.value(Counter::kDeviceToHostBytes), 300u);
}

TYPED_TEST(DeviceConformance, registered_host_memory_copies_like_any_other) {
  const auto stream = this->device_->create_stream("test");
  const HostMapping mapping({.owner = "test", .size_bytes = kMiB});
  const auto registration = this->device_->register_host_memory(mapping.bytes());
  const auto source = pattern(kMiB, 3);
  std::copy(source.begin(), source.end(), mapping.bytes().begin());
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  this->copy_now(*stream, {place.data(), mapping.bytes().data(), kMiB, Direction::kToDevice});
  EXPECT_EQ(this->read_back(*stream, place), source);
}

TYPED_TEST(DeviceConformance, a_stream_ends_after_its_copies) {
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  const auto source = pattern(kMiB, 4);
  int done = 0;
  {
    const auto stream = this->device_->create_stream("short");
    for (int i = 0; i < 5; ++i) {
      stream->copy({place.data(), source.data(), kMiB, Direction::kToDevice},
                   [&](std::exception_ptr) { ++done; });
    }
  }
  this->reactor_.run_until_idle();
  EXPECT_EQ(done, 5);
}

TEST(CudaDevice, without_a_gpu_says_why) {
  const CudaInventory inventory = cuda_devices();
  if (!inventory.gpus.empty()) GTEST_SKIP() << "there is a GPU: " << inventory.gpus[0].name;
  EXPECT_FALSE(inventory.why_none.empty());
  Reactor reactor;
  try {
    CudaDevice::create(reactor, {.index = 0, .capacity_bytes = kMiB});
    FAIL() << "a device was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("no CUDA device: " + inventory.why_none));
  }
}

TEST(HostDevice, a_budget_of_nothing_is_refused) {
  Reactor reactor;
  EXPECT_THROW(HostDevice::create(reactor, 4095), Error);
}

}  // namespace
}  // namespace ziggurat
