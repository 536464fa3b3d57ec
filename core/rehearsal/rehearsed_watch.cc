// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_watch.cc: what is seen of a rank while things go wrong.
#include <fmt/format.h>

#include <utility>

#include "core/rehearsal/rehearsed_rank.h"

namespace ziggurat {

EngineConfig RankOnTwins::watched_config() {
  EngineConfig config = world_.request.config;
  if (world_.watch == nullptr) return config;
  config.before_seal = [this](std::uint64_t generation) {
    RehearsalWatch& watch = *world_.watch;
    std::vector<std::uint64_t>& sealing = watch.ranks[static_cast<std::size_t>(rank_)].sealing;
    watch.must(sealing.empty() || generation > sealing.back(),
               fmt::format("rank {} makes generation {} durable after {}", rank_, generation,
                           sealing.empty() ? 0 : sealing.back()));
    sealing.push_back(generation);
  };
  return config;
}

void RankOnTwins::watch_step(int index, const StepResult& result) {
  RehearsalWatch& watch = *world_.watch;
  std::uint64_t& generation = watch.ranks[static_cast<std::size_t>(rank_)].generation;
  watch.must(index == 0 || result.generation == generation + 1,
             fmt::format("rank {}: step {} made generation {} after {}", rank_, index + 1,
                         result.generation, generation));
  watch.must(result.grad_norm == 0 && !result.clipped && !result.skipped,
             fmt::format("rank {}: step {} had a gradient norm of {}, but all gradients are zero",
                         rank_, index + 1, result.grad_norm));
  generation = result.generation;
}

void RankOnTwins::watch_end() {
  RehearsalWatch::Rank& its = world_.watch->ranks[static_cast<std::size_t>(rank_)];
  for (const FaultyEngine* drive : faulty_) {
    its.reads += drive->calls(FaultPoint::kRead);
    its.writes += drive->calls(FaultPoint::kWrite);
    its.syncs += drive->calls(FaultPoint::kSync);
  }
}

}  // namespace ziggurat
