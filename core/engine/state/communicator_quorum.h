// SPDX-License-Identifier: Apache-2.0
// core/engine/state/communicator_quorum.h: a Quorum, which the store needs, made of a Communicator.
#pragma once

#include <array>
#include <cstdint>

#include "collectives/communicator.h"
#include "tiers/store/quorum.h"

namespace ziggurat {

class CommunicatorQuorum final : public Quorum {
 public:
  explicit CommunicatorQuorum(Communicator& ranks) : ranks_(ranks) {}
  int rank() const noexcept override { return ranks_.rank(); }
  int world_size() const noexcept override { return ranks_.world_size(); }
  Task<std::uint64_t> min(std::uint64_t value) override {
    return reduce(value, Communicator::Op::kMin);
  }
  Task<std::uint64_t> max(std::uint64_t value) override {
    return reduce(value, Communicator::Op::kMax);
  }
  Task<> barrier() override { return ranks_.barrier(); }

 private:
  Task<std::uint64_t> reduce(std::uint64_t value, Communicator::Op op) {
    std::array<std::uint64_t, 1> values{value};
    const std::span<std::uint64_t> view(values);
    co_await ranks_.all_reduce(view, op);
    co_return values[0];
  }

  Communicator& ranks_;
};

/// Does `work` on rank 0 while the other ranks wait for it. Every rank calls this. Errors: those of
/// `work`, on every rank.
inline Task<> first_rank_does(Quorum& ranks, Task<> work, const char* what) {
  Task<> nothing = []() -> Task<> { co_return; }();
  Task<> done = together(ranks, std::move(ranks.rank() == 0 ? work : nothing), what);
  co_await std::move(done);
}

}  // namespace ziggurat
