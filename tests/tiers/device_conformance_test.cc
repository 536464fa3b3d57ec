// SPDX-License-Identifier: Apache-2.0
// tests/tiers/device_conformance_test.cc: what every Device promises, run on the host-emulated one
// and on the CUDA one.
//
// Nothing here holds a stream or looks at a clock: what a device may overlap it need not. Order is
// shown by bytes: work that takes milliseconds is queued first, and what must come after it would
// find other bytes, or leave them, if it did not wait.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <random>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "tiers/device/cuda_device.h"
#include "tiers/device/host_device.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kCapacity = 12 * kMiB;
using Direction = Stream::Direction;

struct HostTraits {
  static std::unique_ptr<Device> create(Reactor& reactor, Metrics& metrics) {
    return HostDevice::create(reactor, kCapacity, nullptr, &metrics);
  }
  static std::string why_none() { return {}; }
};

/// A host device over memory that is lent.
struct LentTraits {
  static std::unique_ptr<Device> create(Reactor& reactor, Metrics& metrics) {
    static const HostMapping lent({.owner = "lender", .size_bytes = kCapacity});
    return HostDevice::create(reactor, lent.bytes(), nullptr, &metrics);
  }
  static std::string why_none() { return {}; }
};

struct CudaTraits {
  static std::unique_ptr<Device> create(Reactor& reactor, Metrics& metrics) {
    return CudaDevice::create(
        reactor, {.index = 0, .capacity_bytes = kCapacity, .trace = nullptr, .metrics = &metrics});
  }
  static std::string why_none() { return cuda_devices().why_none; }
};

std::vector<std::byte> pattern(std::size_t size_bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::size_t at = 0; at < size_bytes; at += sizeof(std::uint32_t)) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), size_bytes - at));
  }
  return bytes;
}

template <class Traits>
class DeviceConformance : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Traits::why_none(); !why.empty())
      GTEST_SKIP() << "no such device: " << why;
    device_ = Traits::create(reactor_, metrics_);
    registration_ = device_->register_host_memory(mapping_.bytes());
  }
  void TearDown() override { reactor_.run_until_idle(); }

  /// Host memory that copies may name.
  std::span<std::byte> host(std::size_t size_bytes) {
    ZIGGURAT_CHECK(used_ + size_bytes <= mapping_.bytes().size(), "the test's host memory is full");
    used_ += size_bytes;
    return mapping_.bytes().subspan(used_ - size_bytes, size_bytes);
  }
  std::span<std::byte> host_pattern(std::size_t size_bytes, unsigned seed) {
    const std::span<std::byte> memory = host(size_bytes);
    std::ranges::copy(pattern(size_bytes, seed), memory.begin());
    return memory;
  }
  void copy_now(Stream& stream, const Stream::Copy& request) {
    reactor_.block_on(copy(reactor_, stream, request));
  }
  Event queue(Stream& stream, const Stream::Copy& request) {
    return stream.copy(request, [](std::exception_ptr error) { EXPECT_FALSE(error); });
  }
  std::vector<std::byte> read_back(Stream& stream, const DeviceBuffer& buffer) {
    const std::size_t used = used_;
    const std::span<std::byte> bytes = host(buffer.size_bytes());
    copy_now(stream, {bytes.data(), buffer.data(), bytes.size(), Direction::kToHost});
    used_ = used;
    return {bytes.begin(), bytes.end()};
  }
  /// Queues work that takes a while: copies within `buffer`, which keep its bytes as they are.
  void keep_busy(Stream& stream, const DeviceBuffer& buffer) {
    const std::uint64_t half = buffer.size_bytes() / 2;
    for (int i = 0; i < 24; ++i) {
      queue(stream, {buffer.data() + half, buffer.data(), half, Direction::kOnDevice});
    }
  }
  Error error_of(Stream& stream, const Stream::Copy& request) {
    try {
      copy_now(stream, request);
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error";
    return Error(ErrorCode::kCancelled, "");
  }

  Reactor reactor_;
  Metrics metrics_;
  const HostMapping mapping_{{.owner = "test", .size_bytes = 32 * kMiB}};
  std::size_t used_ = 0;
  std::unique_ptr<Device> device_;
  std::shared_ptr<HostRegistration> registration_;
};

using Devices = testing::Types<HostTraits, LentTraits, CudaTraits>;
struct Names {
  template <class T>
  static std::string GetName(int) {
    if (std::is_same_v<T, LentTraits>) return "lent";
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
    EXPECT_THAT(error.what(), HasSubstr("4.0 MiB of gradients"));
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
  const std::span<std::byte> source = this->host(5 * kMiB);
  const std::span<std::byte> back = this->host(5 * kMiB + 1);
  for (const std::size_t size :
       {0u, 1u, 2u, 63u, 65u, 4095u, 4097u, 1048577u, 4194304u, 5242879u}) {
    for (const std::size_t offset : {0u, 1u}) {
      std::ranges::copy(pattern(size + offset, static_cast<unsigned>(size)), source.begin());
      std::ranges::fill(back, std::byte{0x5a});
      this->copy_now(*stream,
                     {there.data() + offset, source.data() + offset, size, Direction::kToDevice});
      this->copy_now(*stream, {beside.data(), there.data() + offset, size, Direction::kOnDevice});
      this->copy_now(*stream, {back.data() + offset, beside.data(), size, Direction::kToHost});
      EXPECT_EQ(std::memcmp(source.data() + offset, back.data() + offset, size), 0) << size;
      EXPECT_EQ(back[offset + size], std::byte{0x5a}) << "a byte too many";
    }
  }
}

TYPED_TEST(DeviceConformance, a_stream_keeps_its_order) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  std::vector<unsigned> order;
  for (unsigned i = 0; i < 8; ++i) {
    stream->copy({place.data(), this->host_pattern(kMiB, i).data(), kMiB, Direction::kToDevice},
                 [&order, i](std::exception_ptr error) {
                   EXPECT_FALSE(error);
                   order.push_back(i);
                 });
  }
  EXPECT_EQ(this->read_back(*stream, place), pattern(kMiB, 7)) << "the last copy wins";
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TYPED_TEST(DeviceConformance, an_event_happens_after_all_before_it_on_its_stream) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(4 * kMiB, Purpose::kStaging);
  const auto source = this->host_pattern(4 * kMiB, 1);
  const auto back = this->host(4 * kMiB);
  std::vector<Event> events;
  this->queue(*stream, {place.data(), source.data(), source.size(), Direction::kToDevice});
  events.push_back(stream->record());
  this->keep_busy(*stream, place);
  events.push_back(stream->record());
  this->queue(*stream, {back.data(), place.data(), back.size() / 2, Direction::kToHost});
  events.push_back(stream->record());
  this->reactor_.block_on(events.back().wait());
  EXPECT_EQ(std::memcmp(source.data(), back.data(), back.size() / 2), 0);
  for (const Event& event : events) EXPECT_TRUE(event.happened());
  this->reactor_.block_on(events.front().wait());
  this->reactor_.block_on(Event().wait());
}

TYPED_TEST(DeviceConformance, a_stream_waits_for_an_event_of_another) {
  const auto first = this->device_->create_stream("first");
  const auto second = this->device_->create_stream("second", StreamPriority::kNormal);
  const DeviceBuffer a = this->device_->allocate(2 * kMiB, Purpose::kStaging);
  const DeviceBuffer b = this->device_->allocate(2 * kMiB, Purpose::kStaging);
  for (unsigned round = 0; round < 4; ++round) {
    const auto source = this->host_pattern(2 * kMiB, round);
    const auto back = this->host(2 * kMiB);
    this->keep_busy(*first, a);
    this->queue(*first, {a.data(), source.data(), source.size(), Direction::kToDevice});
    second->wait(first->record());
    const Event copied =
        this->queue(*second, {b.data(), a.data(), source.size(), Direction::kOnDevice});
    first->wait(copied);
    this->reactor_.block_on(
        this->queue(*first, {back.data(), b.data(), back.size(), Direction::kToHost}).wait());
    EXPECT_EQ(std::memcmp(source.data(), back.data(), back.size()), 0) << round;
  }
}

TYPED_TEST(DeviceConformance, on_the_host_waiting_means_waiting) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(2 * kMiB, Purpose::kStaging);
  const auto source = this->host_pattern(2 * kMiB, 1);
  const auto back = this->host(2 * kMiB);
  Host host;
  stream->wait(host.record());
  this->queue(*stream, {place.data(), source.data(), source.size(), Direction::kToDevice});
  this->queue(*stream, {back.data(), place.data(), back.size(), Direction::kToHost});
  const Event event = stream->record();
  host.wait(event);  // the reactor's loop is not running: nobody else makes it happen
  EXPECT_TRUE(event.happened());
  EXPECT_EQ(std::memcmp(source.data(), back.data(), back.size()), 0);
}

TYPED_TEST(DeviceConformance, what_waits_on_the_reactor_runs_before_what_a_blocked_thread_asks) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::string> order;
    const auto waiter = [&order](Event event, std::string name) -> Task<> {
      co_await event.wait();
      order.push_back(std::move(name));
    };
    this->keep_busy(*stream, place);
    const Event event = stream->record();
    this->reactor_.spawn(waiter(event, "first"), {});
    this->reactor_.spawn(waiter(event, "second"), {});
    this->reactor_.block_on(Event().wait());  // both wait now
    Host().wait(event);
    this->reactor_.post([&order] { order.emplace_back("asked"); });
    this->reactor_.run_until_idle();
    ASSERT_THAT(order, testing::ElementsAre("first", "second", "asked")) << round;
  }
}

TYPED_TEST(DeviceConformance, an_event_may_outlive_its_stream_and_the_device) {
  auto stream = this->device_->create_stream("short");
  const DeviceBuffer place = this->device_->allocate(2 * kMiB, Purpose::kStaging);
  this->keep_busy(*stream, place);
  const Event event = stream->record();
  stream.reset();
  EXPECT_TRUE(event.happened()) << "a stream's destructor waits";
  const auto other = this->device_->create_stream("other");
  other->wait(event);
  this->keep_busy(*other, place);
  this->reactor_.block_on(event.wait());
  this->reactor_.block_on(other->record().wait());
}

TYPED_TEST(DeviceConformance, who_gets_memory_next_waits_for_who_had_it_before) {
  const auto first = this->device_->create_stream("first");
  const auto second = this->device_->create_stream("second");
  const DeviceBuffer other = this->device_->allocate(4 * kMiB, Purpose::kStaging);
  const auto old_bytes = this->host_pattern(2 * kMiB, 1);
  const auto new_bytes = this->host_pattern(2 * kMiB, 2);
  const auto back = this->host(2 * kMiB);
  for (int round = 0; round < 3; ++round) {
    DeviceBuffer before = this->device_->allocate(2 * kMiB, Purpose::kParams);
    std::byte* const address = before.data();
    this->copy_now(*first, {address, old_bytes.data(), 2 * kMiB, Direction::kToDevice});
    this->keep_busy(*first, other);
    this->queue(*first, {back.data(), address, 2 * kMiB, Direction::kToHost});
    before = DeviceBuffer();  // the copy out of it has hardly begun
    const DeviceBuffer after = this->device_->allocate(2 * kMiB, Purpose::kGradients);
    ASSERT_EQ(after.data(), address) << "where it lies does not depend on what has happened";
    this->queue(*second, {address, new_bytes.data(), 2 * kMiB, Direction::kToDevice});
    EXPECT_EQ(this->read_back(*second, after), pattern(2 * kMiB, 2));
    this->reactor_.block_on(first->record().wait());
    EXPECT_EQ(std::memcmp(old_bytes.data(), back.data(), back.size()), 0);
    EXPECT_TRUE(after.before_use().empty());
  }
}

TYPED_TEST(DeviceConformance, a_buffer_has_the_events_of_every_range_that_it_covers) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer busy = this->device_->allocate(4 * kMiB, Purpose::kStaging);
  DeviceBuffer left = this->device_->allocate(64 * kKiB, Purpose::kStaging);
  DeviceBuffer middle = this->device_->allocate(64 * kKiB, Purpose::kStaging);
  DeviceBuffer right = this->device_->allocate(64 * kKiB, Purpose::kStaging);
  std::byte* const begin = left.data();
  const Event never_used = stream->record();
  this->keep_busy(*stream, busy);
  const Event in_left = stream->record();
  const Event in_right = stream->record();
  left.used_until(in_left);
  right.used_until(in_right);
  right.used_until(never_used);  // of the same stream, and before
  left = DeviceBuffer();
  middle = DeviceBuffer();
  right = DeviceBuffer();
  const DeviceBuffer half = this->device_->allocate(96 * kKiB, Purpose::kStaging);
  const DeviceBuffer rest = this->device_->allocate(96 * kKiB, Purpose::kStaging);
  ASSERT_EQ(half.data(), begin);
  ASSERT_EQ(rest.data(), begin + 96 * kKiB);
  // What has happened meanwhile is not there any more; nothing else may be there.
  const auto only = [](const std::vector<Event>& events, const Event& event) {
    if (events.empty()) return event.happened();
    return events.size() == 1 && events[0].state() == event.state();
  };
  EXPECT_TRUE(only(half.before_use(), in_left));
  EXPECT_TRUE(only(rest.before_use(), in_right));
  this->reactor_.block_on(in_right.wait());
  EXPECT_TRUE(rest.before_use().empty());
}

TYPED_TEST(DeviceConformance, completions_come_on_the_reactors_thread) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(64, Purpose::kStaging);
  const auto source = this->host_pattern(64, 1);
  this->reactor_.start();
  Signal finished(this->reactor_);
  bool on_reactor = false;
  bool event_on_reactor = false;
  const auto body = [&]() -> Task<> {
    const std::function<void(std::exception_ptr)> done = [&](std::exception_ptr) {
      on_reactor = this->reactor_.on_reactor_thread();
      finished.set();
    };
    stream->copy({place.data(), source.data(), 64, Direction::kToDevice}, done);
    const Event event = stream->record();
    co_await event.wait();
    event_on_reactor = this->reactor_.on_reactor_thread();
    co_await finished.wait();
  };
  this->reactor_.block_on(body());
  EXPECT_TRUE(on_reactor);
  EXPECT_TRUE(event_on_reactor);
  this->reactor_.stop();
}

TYPED_TEST(DeviceConformance, a_copy_outside_the_buffers_fails_and_the_stream_with_it) {
  const auto broken = this->device_->create_stream("broken");
  const auto other = this->device_->create_stream("other");
  DeviceBuffer gone = this->device_->allocate(kMiB, Purpose::kStaging);
  std::byte* const nowhere = gone.data();
  gone = DeviceBuffer();
  const auto host = this->host_pattern(kMiB, 1);
  for (const auto& [destination, size] :
       {std::pair<std::byte*, std::uint64_t>{nowhere, 1}, {host.data(), 1}, {nullptr, 1}}) {
    const auto stream = this->device_->create_stream("one");
    const Error error =
        this->error_of(*stream, {destination, host.data(), size, Direction::kToDevice});
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("not in one of the device's buffers"));
  }
  const DeviceBuffer place = this->device_->allocate(kCapacity, Purpose::kStaging);
  std::byte* past = place.data() + kCapacity - kMiB + 1;
  const Stream::Copy too_long{past, host.data(), kMiB, Direction::kToDevice};
  EXPECT_EQ(this->error_of(*broken, too_long).code(), ErrorCode::kInvalidArgument);
  const Stream::Copy good{place.data(), host.data(), kMiB, Direction::kToDevice};
  EXPECT_EQ(this->error_of(*broken, good).code(), ErrorCode::kInvalidArgument)
      << "what came after it on the stream may depend on it";
  EXPECT_THROW(this->reactor_.block_on(broken->record().wait()), Error);
  EXPECT_NO_THROW(this->copy_now(*other, good));
  other->wait(broken->record());
  EXPECT_EQ(this->error_of(*other, good).code(), ErrorCode::kInvalidArgument)
      << "what waits for a failure has failed";
}

/// Rows that lie apart on the device are together on the host, and what is between them stays.
TYPED_TEST(DeviceConformance, rows_go_to_their_places_and_come_back) {
  constexpr std::uint64_t kRows = 7;
  constexpr std::uint64_t kRow = 64 * kKiB + 24;
  constexpr std::uint64_t kStride = 3 * kRow + 8;
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer buffer = this->device_->allocate(2 * kMiB, Purpose::kStaging);
  const auto before = this->host_pattern(2 * kMiB, 1);
  const auto rows = this->host_pattern(kRows * kRow, 2);
  this->copy_now(*stream, {buffer.data(), before.data(), 2 * kMiB, Direction::kToDevice});
  const std::uint64_t counted = this->metrics_.value(Counter::kHostToDeviceBytes);
  this->copy_now(*stream, {.destination = buffer.data() + 16,
                           .source = rows.data(),
                           .size_bytes = kRow,
                           .direction = Direction::kToDevice,
                           .rows = kRows,
                           .destination_stride_bytes = kStride,
                           .source_stride_bytes = kRow});
  EXPECT_EQ(this->metrics_.value(Counter::kHostToDeviceBytes) - counted, kRows * kRow);
  std::vector<std::byte> expected(before.begin(), before.end());
  for (std::uint64_t row = 0; row < kRows; ++row)
    std::ranges::copy(rows.subspan(row * kRow, kRow), expected.begin() + 16 + row * kStride);
  EXPECT_EQ(this->read_back(*stream, buffer), expected);
  const auto back = this->host(kRows * kRow);
  this->copy_now(*stream, {.destination = back.data(),
                           .source = buffer.data() + 16,
                           .size_bytes = kRow,
                           .direction = Direction::kToHost,
                           .rows = kRows,
                           .destination_stride_bytes = kRow,
                           .source_stride_bytes = kStride});
  EXPECT_EQ(std::memcmp(back.data(), rows.data(), rows.size()), 0);
  const Stream::Copy past_the_end{.destination = buffer.data() + 2 * kMiB - 6 * kStride - kRow + 1,
                                  .source = rows.data(),
                                  .size_bytes = kRow,
                                  .direction = Direction::kToDevice,
                                  .rows = kRows,
                                  .destination_stride_bytes = kStride,
                                  .source_stride_bytes = kRow};
  const Error error = this->error_of(*stream, past_the_end);
  EXPECT_THAT(error.what(), HasSubstr("in 7 rows to device"));
  EXPECT_THAT(error.what(), HasSubstr("not in one of the device's buffers"));
}

TYPED_TEST(DeviceConformance, a_failure_is_reported_in_its_turn) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(4 * kMiB, Purpose::kStaging);
  const auto source = this->host_pattern(4 * kMiB, 1);
  const auto back = this->host(4 * kMiB);
  bool failed = false;
  this->queue(*stream, {place.data(), source.data(), source.size(), Direction::kToDevice});
  stream->copy({back.data(), place.data(), back.size(), Direction::kToHost},
               [&](std::exception_ptr error) {
                 EXPECT_FALSE(error);
                 EXPECT_FALSE(failed);
               });
  stream->copy({nullptr, source.data(), 1, Direction::kToDevice}, [&](std::exception_ptr error) {
    EXPECT_TRUE(error);
    EXPECT_EQ(std::memcmp(source.data(), back.data(), back.size()), 0)
        << "those before it have finished";
    failed = true;
  });
  EXPECT_THROW(this->reactor_.block_on(stream->record().wait()), Error);
  EXPECT_TRUE(failed);
}

TYPED_TEST(DeviceConformance, bytes_are_counted_by_link) {
  const auto stream = this->device_->create_stream("test");
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  const auto host = this->host(kMiB);
  this->copy_now(*stream, {place.data(), host.data(), 1000, Direction::kToDevice});
  this->copy_now(*stream, {host.data(), place.data(), 300, Direction::kToHost});
  this->copy_now(*stream, {place.data() + 500, place.data(), 400, Direction::kOnDevice});
  EXPECT_EQ(this->metrics_.value(Counter::kHostToDeviceBytes), 1000u);
  EXPECT_EQ(this->metrics_.value(Counter::kDeviceToHostBytes), 300u);
}

TYPED_TEST(DeviceConformance, memory_stays_registered_while_a_copy_of_it_is_under_way) {
  const auto stream = this->device_->create_stream("test");
  const HostMapping mapping({.owner = "test", .size_bytes = 2 * kMiB});
  auto registration = this->device_->register_host_memory(mapping.bytes());
  std::ranges::copy(pattern(2 * kMiB, 3), mapping.bytes().begin());
  const DeviceBuffer place = this->device_->allocate(2 * kMiB, Purpose::kStaging);
  this->keep_busy(*stream, place);
  this->queue(*stream, {place.data(), mapping.bytes().data(), 2 * kMiB, Direction::kToDevice});
  registration.reset();
  EXPECT_EQ(this->read_back(*stream, place), pattern(2 * kMiB, 3));
}

TYPED_TEST(DeviceConformance, a_stream_ends_after_its_copies) {
  const DeviceBuffer place = this->device_->allocate(kMiB, Purpose::kStaging);
  const auto source = this->host_pattern(kMiB, 4);
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
    EXPECT_THAT(error.what(), HasSubstr("no CUDA device can be used: " + inventory.why_none));
  }
}

TEST(HostDevice, a_budget_of_nothing_is_refused) {
  Reactor reactor;
  EXPECT_THROW(HostDevice::create(reactor, 4095), Error);
}

TEST(HostDevice, memory_may_be_lent) {
  Reactor reactor;
  const HostMapping lent({.owner = "lender", .size_bytes = 64 * kKiB});
  std::ranges::fill(lent.bytes(), std::byte{7});
  {
    // 60 KiB of it, and some bytes that are no page.
    const auto device = HostDevice::create(reactor, lent.bytes().first(60 * kKiB + 100));
    EXPECT_THAT(device->description(), HasSubstr("60.0 KiB lent by the caller"));
    EXPECT_FALSE(device->holds_zeros());
    const DeviceBuffer all = device->allocate(60 * kKiB, Purpose::kParams);
    EXPECT_EQ(all.data(), lent.bytes().data());
    std::memset(all.data(), 9, 60 * kKiB);
    EXPECT_THROW(device->allocate(1, Purpose::kParams), Error);
  }
  EXPECT_EQ(lent.bytes()[60 * kKiB - 1], std::byte{9});
  EXPECT_EQ(lent.bytes()[60 * kKiB], std::byte{7});
}

TEST(HostDevice, lent_memory_begins_with_a_page_and_has_one) {
  Reactor reactor;
  const HostMapping lent({.owner = "lender", .size_bytes = 64 * kKiB});
  const auto refusal = [&](std::span<std::byte> memory) -> std::string {
    try {
      HostDevice::create(reactor, memory);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(refusal(lent.bytes().subspan(64)), HasSubstr("lend memory whose address 4096"));
  EXPECT_THAT(refusal(lent.bytes().first(4095)), HasSubstr("give at least 4 KiB"));
}

// What only a device whose streams can be held may show; a host function of CUDA's must not wait
// for another stream's work.
class HeldHostDevice : public testing::Test {
 protected:
  /// Keeps `stream` from going on until the result is set.
  static std::promise<void> hold(Stream& stream) {
    std::promise<void> release;
    dynamic_cast<HostStream&>(stream).enqueue(
        [held = release.get_future().share()] { held.wait(); });
    return release;
  }

  Reactor reactor_;
  const std::unique_ptr<HostDevice> device_ = HostDevice::create(reactor_, kCapacity);
};

TEST_F(HeldHostDevice, streams_go_on_while_another_is_held) {
  const auto held = device_->create_stream("held");
  const auto free = device_->create_stream("free");
  const DeviceBuffer a = device_->allocate(kMiB, Purpose::kStaging);
  const DeviceBuffer b = device_->allocate(kMiB, Purpose::kStaging);
  const auto source = pattern(kMiB, 1);
  std::promise<void> release = hold(*held);
  held->copy({a.data(), source.data(), kMiB, Direction::kToDevice}, [](std::exception_ptr) {});
  const Event event = held->record();
  reactor_.block_on(copy(reactor_, *free, {b.data(), source.data(), kMiB, Direction::kToDevice}));
  EXPECT_EQ(std::memcmp(b.data(), source.data(), kMiB), 0);
  EXPECT_FALSE(event.happened());
  release.set_value();
  reactor_.block_on(event.wait());
  EXPECT_EQ(std::memcmp(a.data(), source.data(), kMiB), 0);
}

TEST_F(HeldHostDevice, memory_given_back_under_a_held_copy_keeps_its_event) {
  const auto held = device_->create_stream("held");
  const auto other = device_->create_stream("other");
  const auto source = pattern(kMiB, 1);
  std::promise<void> release = hold(*held);
  DeviceBuffer before = device_->allocate(kMiB, Purpose::kStaging);
  held->copy({before.data(), source.data(), kMiB, Direction::kToDevice}, [](std::exception_ptr) {});
  before = DeviceBuffer();
  const DeviceBuffer after = device_->allocate(kMiB / 2, Purpose::kStaging);
  const DeviceBuffer beside = device_->allocate(kMiB / 4, Purpose::kStaging);
  EXPECT_EQ(after.before_use().size(), 1u);
  EXPECT_EQ(beside.before_use().size(), 1u) << "each part of what was given back";
  other->copy({after.data(), source.data(), kKiB, Direction::kToDevice}, [](std::exception_ptr) {});
  const Event event = other->record();
  reactor_.run_until_idle();
  EXPECT_FALSE(event.happened()) << "its copy waits for the one that had the memory before";
  release.set_value();
  reactor_.block_on(event.wait());
  EXPECT_TRUE(after.before_use().empty());
}

}  // namespace
}  // namespace ziggurat
