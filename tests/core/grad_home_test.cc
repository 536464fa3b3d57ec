// SPDX-License-Identifier: Apache-2.0
// tests/core/grad_home_test.cc: what every home of gradients promises: the update is given what was
// accepted, in host memory or on the device. A new home is a row of the suite.
#include "core/schedule/homes/grad_home.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/core/home_rig.h"

namespace ziggurat::testing {
namespace grad_home_test {

constexpr Need kNow{.generation = 0, .position = 0};

Task<DeviceBuffer> allocated(Device& device, std::uint64_t size_bytes, Purpose purpose) {
  co_return device.allocate(size_bytes, purpose);
}

class EveryGradHome : public ::testing::TestWithParam<const char*> {
 public:
  EveryGradHome() { rig_.run(make(*this)); }
  ~EveryGradHome() override { rig_.run(destroy(*this)); }

 protected:
  static Task<> make(EveryGradHome& test) {
    const UnitGradHome::AllocateDevice allocate = [&test](std::uint64_t size_bytes,
                                                          Purpose purpose) {
      return allocated(test.rig_.device(), size_bytes, purpose);
    };
    test.home_ = UnitGradHome::create(test.rig_.context(), test.rig_.places(), allocate);
    co_return;
  }
  static Task<> destroy(EveryGradHome& test) {
    test.home_.reset();
    co_return;
  }

  /// A chunk's gradient of a step.
  std::vector<std::byte> gradient(ChunkId id, int step) const {
    std::vector<std::byte> bytes(rig_.table().chunk(id).param_bytes());
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>((i * 5 + i / 253 + id * 17 + std::size_t(step) * 91) % 256);
    return bytes;
  }
  Task<> accept(int step) {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
      const std::vector<std::byte> its = gradient(id, step);
      DeviceBuffer source = rig_.device().allocate(its.size(), Purpose::kGradients);
      const std::span<std::byte> memory = HostDevice::view(device_span(source));
      std::ranges::copy(its, memory.begin());
      co_await home_->accept(id, device_span(source), kNow);
      std::ranges::fill(memory, std::byte{0xEE});  // the source may be reused
    }
  }
  Task<> drop_all() {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) home_->drop(id);
    co_return;
  }
  Task<> expect_fetched(int step) {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
      const Chunk& chunk = rig_.table().chunk(id);
      const Lease item = co_await rig_.item(home_->item_bytes(chunk));
      Task<TypedSpan<const std::byte>> fetching = home_->fetch(id, item.bytes());
      const TypedSpan<const std::byte> found = co_await std::move(fetching);
      EXPECT_EQ(found.dtype, rig_.table().chunk_dtype(id));
      EXPECT_TRUE(std::ranges::equal(found.bytes, gradient(id, step))) << "chunk " << id;
    }
  }
  Task<> expect_fetched_to_device(int step) {
    for (ChunkId id = 0; id < rig_.table().chunks().size(); ++id) {
      const Chunk& chunk = rig_.table().chunk(id);
      const Lease item = co_await rig_.item(home_->item_bytes(chunk));
      const DeviceBuffer staging = rig_.device().allocate(chunk.param_bytes(), Purpose::kStaging);
      Task<TypedDeviceSpan<const std::byte>> fetching =
          home_->fetch_to_device(id, item.bytes(), device_span(staging));
      const TypedDeviceSpan<const std::byte> found = co_await std::move(fetching);
      EXPECT_TRUE(std::ranges::equal(HostDevice::view(found.bytes), gradient(id, step)))
          << "chunk " << id;
    }
  }

  HomeRig rig_{std::string("params=host,") + GetParam() + ",optimizer=nvme"};
  std::unique_ptr<UnitGradHome> home_;
};

TEST_P(EveryGradHome, GivesTheUpdateWhatWasAccepted) {
  rig_.run(accept(1));
  rig_.run(expect_fetched(1));
  rig_.run(expect_fetched_to_device(1));
}

TEST_P(EveryGradHome, TakesTheNextStepsGradientsAfterADrop) {
  rig_.run(accept(1));
  const std::uint64_t held_bytes = rig_.device().account().used_bytes();
  rig_.run(drop_all());
  rig_.run(accept(2));
  EXPECT_EQ(rig_.device().account().used_bytes(), held_bytes) << "dropped gradients hold nothing";
  rig_.run(expect_fetched(2));
}

TEST_P(EveryGradHome, KnowsWhichChunksHaveNone) {
  EXPECT_FALSE(home_->absent(1));
  home_->set_absent(1, true);
  EXPECT_TRUE(home_->absent(1));
  EXPECT_FALSE(home_->absent(0));
  home_->set_absent(1, false);
  EXPECT_FALSE(home_->absent(1));
}

INSTANTIATE_TEST_SUITE_P(Tiers, EveryGradHome,
                         ::testing::Values("grads=device", "grads=host", "grads=nvme"),
                         [](const auto& suite) {
                           return std::string(suite.param).substr(std::strlen("grads="));
                         });

}  // namespace grad_home_test
}  // namespace ziggurat::testing
