// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_close_test.cc: a rank that closes its engine while its drive hangs: the others
// are told at once, and do not wait until the drive answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <thread>

#include "aio/probe.h"
#include "tests/core/lent_world.h"
#include "tests/support/hanging_engine.h"
#include "tiers/device/device.h"

namespace ziggurat::testing {
namespace lent_close_test {

using test::HangingEngine;
using test::HangingTarget;
using ::testing::HasSubstr;

TEST(LentClose, OfARankWhoseDriveHangsIsToldToTheOthers) {
  World world(kTwo, Where::kNvme);
  const auto runtimes = connected_runtimes(2, 1);
  HangingTarget drive;
  runtimes[1]->io_engine = [&](Reactor& reactor, const std::string& path) {
    return std::make_unique<HangingEngine>(reactor, choose_io_engine(reactor, path), drive);
  };
  std::barrier<> both(2);
  std::atomic<bool> closed = false;
  expect_none(run_ranks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    LentTrainer& trainer = world.trainers[index];
    ModelSpec model = trainer.own_model();
    for (UnitSpec& unit : model.units) unit.params[0].streamed = 0;
    EngineConfig config = world.config(rank);
    config.placement.params = Tier::kNvme;
    const auto device = HostDevice::create(runtimes[index]->reactor, 8 * kMiB);
    const auto engine =
        LentEngine::open(model, config, *runtimes[index], trainer.lent(), device.get());
    trainer.step(*engine);
    engine->make_durable();
    both.arrive_and_wait();
    if (rank == 1) {
      drive.die_at(HangingTarget::Call::kOther, 0);
      engine->expect_units(std::array<StreamedUnit, 1>{0});  // read ahead
      while (!drive.has_died()) std::this_thread::yield();
      both.arrive_and_wait();
      engine->close();
      closed = true;
      return;
    }
    both.arrive_and_wait();
    const Error unmade = thrown_by([&] { trainer.step(*engine); });
    EXPECT_EQ(unmade.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(unmade.what(), HasSubstr("rank 1 has closed its engine"));
    EXPECT_FALSE(closed) << "the drive has answered";
    drive.come_back();
  }));
}

}  // namespace lent_close_test
}  // namespace ziggurat::testing
