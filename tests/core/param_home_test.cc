// SPDX-License-Identifier: Apache-2.0
// tests/core/param_home_test.cc: what every home of parameters promises: what an update publishes,
// or the trainer stores, is what is fetched and loaded. A new home is a row of the suite.
#include "core/schedule/homes/param_home.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/core/home_rig.h"

namespace ziggurat::testing {
namespace param_home_test {

constexpr Need kNow{.generation = 0, .position = 0};

/// A byte that tells its place, and which `version` of the parameters it is.
std::byte byte_of(UnitId unit, std::uint64_t place, int version) {
  const auto number = static_cast<std::uint64_t>(version);
  return static_cast<std::byte>((place * 7 + place / 251 + unit * 13 + number * 101 + 1) % 256);
}

class EveryParamHome : public ::testing::TestWithParam<const char*> {
 public:
  EveryParamHome() { rig_.run(make(*this)); }
  ~EveryParamHome() override { rig_.run(destroy(*this)); }

 protected:
  static Task<> make(EveryParamHome& test) {
    test.home_ = UnitParamHome::create(test.rig_.context(), test.rig_.places());
    co_return;
  }
  static Task<> destroy(EveryParamHome& test) {
    test.home_.reset();
    co_return;
  }

  std::uint64_t unit_bytes(UnitId unit) const { return rig_.table().unit_param_bytes(unit); }
  /// The bytes of a unit before those of a chunk.
  std::uint64_t begin_bytes(ChunkId id) const {
    const Chunk& chunk = rig_.table().chunk(id);
    return chunk.begin * rig_.table().element_bytes(chunk.unit);
  }
  std::vector<std::byte> version(UnitId unit, int version) const {
    std::vector<std::byte> bytes(unit_bytes(unit));
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_of(unit, i, version);
    return bytes;
  }
  std::vector<std::byte> version_of(ChunkId id, int number) const {
    const Chunk& chunk = rig_.table().chunk(id);
    const std::vector<std::byte> all = version(chunk.unit, number);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(begin_bytes(id));
    return {begin, begin + static_cast<std::ptrdiff_t>(chunk.param_bytes())};
  }

  /// Publishes a version of every chunk, as the CPU's update does.
  Task<> publish(int number) {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
      const Lease item = co_await rig_.item(home_->item_bytes(rig_.table().chunk(id)));
      const TypedSpan<std::byte> values = home_->destination(id, item.bytes());
      std::ranges::copy(version_of(id, number), values.bytes.begin());
      co_await home_->publish(id, values, {});
    }
  }
  /// The same as the device's update does.
  Task<> publish_from_device(int number) {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
      const Chunk& chunk = rig_.table().chunk(id);
      const Lease item = co_await rig_.item(home_->item_bytes(chunk));
      const DeviceBuffer staging = rig_.device().allocate(chunk.param_bytes(), Purpose::kStaging);
      const TypedDeviceSpan<std::byte> values =
          home_->destination_on_device(id, device_span(staging));
      std::ranges::copy(version_of(id, number), HostDevice::view(values.bytes).begin());
      co_await home_->publish_from_device(id, values, item.bytes());
    }
  }
  /// Stores a version of every unit that the trainer has written on the device.
  Task<> store(int number) {
    for (UnitId unit = 0; unit < rig_.table().unit_count(); ++unit) {
      const std::vector<std::byte> written = version(unit, number);
      DeviceBuffer copy;
      DeviceSpan<const std::byte> there = home_->view(unit);
      if (!home_->used_at_home()) {
        copy = rig_.device().allocate(written.size(), Purpose::kParams);
        there = device_span(copy);
      }
      std::memcpy(reinterpret_cast<std::byte*>(there.address()), written.data(), written.size());
      const UnitParamHome::Written all{.at_bytes = 0, .from = there.first(written.size())};
      co_await home_->store(unit, {&all, 1});
    }
  }
  Task<> expect_fetched(int number) {
    for (UnitId unit = 0; unit < rig_.table().unit_count(); ++unit) {
      const UnitParamHome::Fetched its = co_await home_->fetch(unit, kNow, IoPriority::kDemand);
      const std::vector<std::byte> expected = version(unit, number);
      EXPECT_TRUE(std::ranges::equal(its.bytes.first(expected.size()), expected))
          << "unit " << unit;
    }
  }
  Task<> expect_zeros() {
    for (UnitId unit = 0; unit < rig_.table().unit_count(); ++unit) {
      const UnitParamHome::Fetched its = co_await home_->fetch(unit, kNow, IoPriority::kDemand);
      EXPECT_TRUE(std::ranges::all_of(its.bytes, [](std::byte b) { return b == std::byte{0}; }))
          << "unit " << unit;
    }
  }
  Task<> expect_loaded(int number) {
    for (UnitId unit = 0; unit < rig_.table().unit_count(); ++unit) {
      const DeviceBuffer there = rig_.device().allocate(unit_bytes(unit), Purpose::kParams);
      const UnitParamHome::Loading its =
          co_await home_->load(unit, there.data(), kNow, IoPriority::kDemand);
      co_await its.landed.wait();
      EXPECT_TRUE(std::ranges::equal(HostDevice::view(device_span(there)), version(unit, number)))
          << "unit " << unit;
    }
  }
  Task<> expect_brought(int number) {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
      const Lease item = co_await rig_.item(home_->item_bytes(rig_.table().chunk(id)));
      co_await home_->bring(id, item.bytes(), {});
      EXPECT_TRUE(
          std::ranges::equal(home_->destination(id, item.bytes()).bytes, version_of(id, number)))
          << "chunk " << id;
    }
  }

  HomeRig rig_{std::string(GetParam()) + ",grads=host,optimizer=nvme"};
  std::unique_ptr<UnitParamHome> home_;
};

/// The first byte of each chunk differs, so that chunks in each other's places would be found.
TEST_P(EveryParamHome, HasWhatAnUpdateHasPublished) {
  rig_.run(publish(1));
  rig_.run(expect_fetched(1));
  rig_.run(expect_loaded(1));
  rig_.run(expect_brought(1));
}

TEST_P(EveryParamHome, HasWhatAnUpdateOnTheDeviceHasPublished) {
  rig_.run(publish_from_device(2));
  rig_.run(expect_fetched(2));
}

TEST_P(EveryParamHome, HasTheNewestVersion) {
  rig_.run(publish(1));
  rig_.run(publish(2));
  rig_.run(expect_fetched(2));
  rig_.run(expect_loaded(2));
}

TEST_P(EveryParamHome, BeginsWithZerosIfItSaysSo) {
  if (home_->begins_with_zeros()) rig_.run(expect_zeros());
}

TEST_P(EveryParamHome, HasWhatTheTrainerHasStored) {
  rig_.run(publish(1));
  rig_.run(store(3));
  rig_.run(expect_fetched(3));
}

/// What stays in memory is where the next update writes, without a work item.
TEST_P(EveryParamHome, InMemoryKeepsParametersAtTheirDestination) {
  rig_.run(publish(1));
  for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
    const Chunk& chunk = rig_.table().chunk(id);
    if (!home_->in_memory(chunk.unit)) continue;
    EXPECT_EQ(home_->item_bytes(chunk), 0U);
    EXPECT_TRUE(std::ranges::equal(home_->destination(id, {}).bytes, version_of(id, 1)));
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, EveryParamHome,
                         ::testing::Values("params=device", "params=host", "params=nvme"),
                         [](const auto& suite) {
                           return std::string(suite.param).substr(std::strlen("params="));
                         });

}  // namespace param_home_test
}  // namespace ziggurat::testing
