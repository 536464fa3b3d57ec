// SPDX-License-Identifier: Apache-2.0
// integrations/cli/train_ranks.cc: makes small reductions, on a communicator of its own.
#include "integrations/cli/train_ranks.h"

#include <numeric>
#include <utility>

#include "core/schedule/context.h"

namespace ziggurat::cli {

TrainRanks::TrainRanks(Runtime& runtime) : runtime_(runtime) {
  runtime.reactor.block_on([](TrainRanks& self) -> Task<> {
    Communicator& all = *self.runtime_.ranks;
    self.rank_ = all.rank();
    self.count_ = all.world_size();
    std::vector<int> members(static_cast<std::size_t>(self.count_));
    std::iota(members.begin(), members.end(), 0);
    self.channel_ = all.split(members);
    co_return;
  }(*this));
}

TrainRanks::~TrainRanks() { runtime_.reactor.destroy(channel_); }

std::vector<double> TrainRanks::reduce(std::vector<double> values, Communicator::Op op) {
  const CountedTime waited(runtime_.reactor.clock(), runtime_.metrics, Counter::kWaitRanksNs);
  return runtime_.reactor.block_on([](Communicator& channel, std::vector<double> its,
                                      Communicator::Op how) -> Task<std::vector<double>> {
    co_await channel.all_reduce(std::span<double>(its), how);
    co_return its;
  }(*channel_, std::move(values), op));
}

TrainRanks::Shared TrainRanks::share(const Shared& own) {
  if (count_ == 1) return own;
  const std::vector<double> sums =
      reduce({own.loss, own.interrupted ? 1.0 : 0.0, own.save ? 1.0 : 0.0}, Communicator::Op::kSum);
  return {sums[0] / count_, sums[1] > 0, sums[2] > 0};
}

double TrainRanks::mean(double value) { return share({.loss = value}).loss; }

void TrainRanks::part() { share({}); }

void TrainRanks::gather(std::span<std::byte> values, std::size_t one_bytes) {
  runtime_.reactor.block_on(
      [](Communicator& channel, std::span<std::byte> all, std::size_t size) -> Task<> {
        const auto own = static_cast<std::size_t>(channel.rank());
        co_await channel.all_gather(all.subspan(own * size, size), all);
      }(*channel_, values, one_bytes));
}

Traffic TrainRanks::traffic() {
  return runtime_.reactor.block_on(
      [](Communicator& channel) -> Task<Traffic> { co_return channel.traffic(); }(*channel_));
}

std::vector<double> TrainRanks::waited_for() {
  std::vector<double> seconds;
  for (const Nanoseconds waited : traffic().waited)
    seconds.push_back(std::chrono::duration<double>(waited).count());
  return count_ == 1 ? seconds : reduce(std::move(seconds), Communicator::Op::kMax);
}

}  // namespace ziggurat::cli
