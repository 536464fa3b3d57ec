// SPDX-License-Identifier: Apache-2.0
// tests/support/simulated_quorum.h: the ranks of a job as coroutines on one reactor, meeting in
// memory.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/runtime/async.h"
#include "tiers/quorum.h"

namespace ziggurat {

/// Where ranks meet. Lives as long as their quorums.
class SimulatedRanks {
 public:
  SimulatedRanks(Reactor& reactor, int world_size)
      : reactor_(reactor), world_size_(world_size), round_(std::make_shared<Round>(reactor)) {}

  enum class Call { kMin, kMax, kBarrier };

  Task<std::uint64_t> meet(Call call, std::uint64_t value) {
    if (lost_) std::rethrow_exception(lost_);
    const std::shared_ptr<Round> round = round_;
    ZIGGURAT_CHECK(round->arrived == 0 || round->call == call,
                   "the ranks call in different orders");
    round->call = call;
    round->lowest = std::min(round->lowest, value);
    round->highest = std::max(round->highest, value);
    if (++round->arrived == world_size_) {
      round_ = std::make_shared<Round>(reactor_);
      round->complete.set();
    }
    co_await round->complete.wait();
    co_return call == Call::kMin ? round->lowest : round->highest;
  }

  /// A rank is gone: whoever waits for it, now or later, gets `error`.
  void lose(const std::exception_ptr& error) {
    if (lost_) return;
    lost_ = error;
    round_->complete.fail(error);
  }

  int world_size() const noexcept { return world_size_; }

 private:
  struct Round {
    explicit Round(Reactor& reactor) : complete(reactor) {}
    Call call = Call::kBarrier;
    int arrived = 0;
    std::uint64_t lowest = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t highest = 0;
    Signal complete;
  };
  Reactor& reactor_;
  int world_size_;
  std::shared_ptr<Round> round_;
  std::exception_ptr lost_;
};

class SimulatedQuorum final : public Quorum {
 public:
  SimulatedQuorum(SimulatedRanks& ranks, int rank) : ranks_(ranks), rank_(rank) {}
  int rank() const noexcept override { return rank_; }
  int world_size() const noexcept override { return ranks_.world_size(); }
  Task<std::uint64_t> min(std::uint64_t value) override {
    return ranks_.meet(SimulatedRanks::Call::kMin, value);
  }
  Task<std::uint64_t> max(std::uint64_t value) override {
    return ranks_.meet(SimulatedRanks::Call::kMax, value);
  }
  Task<> barrier() override { co_await ranks_.meet(SimulatedRanks::Call::kBarrier, 0); }

 private:
  SimulatedRanks& ranks_;
  int rank_;
};

}  // namespace ziggurat
