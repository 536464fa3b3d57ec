// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsal.cc: lets all ranks of a rehearsal live on one reactor.
#include "core/rehearsal/rehearsal.h"

#include <fmt/format.h>

#include "base/error.h"
#include "collectives/self_communicator.h"
#include "collectives/simulated/mirrored_communicator.h"
#include "collectives/simulated/simulated_communicator.h"
#include "core/rehearsal/rehearsed_rank.h"

namespace ziggurat {
namespace {

void validate(const RehearsalRequest& request) {
  const std::size_t units = request.model.units.size();
  if (request.costs.size() != units) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a rehearsal has the costs of {} units, but the model has {}: give the "
                            "costs of each unit",
                            request.costs.size(), units));
  }
  if (request.steps < 1 || request.micro_batches < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a rehearsal of {} steps of {} micro-batches plays nothing: give at "
                            "least one of each",
                            request.steps, request.micro_batches));
  }
}

std::vector<std::unique_ptr<Communicator>> communicators(RehearsedWorld& world) {
  const NetworkShape& network = world.network;
  if (network.ranks > 1 && !world.request.mirrored)
    return SimulatedCommunicator::create(world.reactor, network, &world.absent, world.ledger());
  std::vector<std::unique_ptr<Communicator>> alone;
  if (network.ranks > 1) {
    alone.push_back(
        MirroredCommunicator::create(world.reactor, network, &world.absent, world.trace.get()));
  } else {
    alone.push_back(std::make_unique<SelfCommunicator>());
  }
  return alone;
}

Task<> live(Reactor& reactor, std::vector<std::unique_ptr<RankOnTwins>>& ranks) {
  WorkGroup all(reactor);
  for (const auto& rank : ranks) all.spawn(rank->live());
  co_await all.wait_idle();
}

}  // namespace

std::vector<RehearsedRank> play(RehearsedWorld& world) {
  std::vector<std::unique_ptr<RankOnTwins>> ranks;
  for (std::unique_ptr<Communicator>& its : communicators(world)) {
    if (world.request.around_ranks) its = world.request.around_ranks(std::move(its));
    ranks.push_back(std::make_unique<RankOnTwins>(world, std::move(its)));
  }
  world.reactor.block_on(live(world.reactor, ranks));
  std::vector<RehearsedRank> all;
  for (const auto& rank : ranks) all.push_back(rank->take());
  return all;
}

std::vector<RehearsedRank> rehearse(const RehearsalRequest& request) {
  validate(request);
  RehearsedWorld world(
      request, std::make_shared<SimulatedDisk>(disk_bytes(request), SimulatedDisk::Keeps::kAll),
      nullptr);
  return play(world);
}

}  // namespace ziggurat
