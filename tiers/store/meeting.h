// SPDX-License-Identifier: Apache-2.0
// tiers/store/meeting.h: lets coroutines of one reactor agree. Each represents a member: a stripe
// of a rank, or in simulations a whole rank.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "base/runtime/async.h"
#include "tiers/store/quorum.h"

namespace ziggurat {

/// A meeting lives as long as its members. All members make the same calls in the same order.
class Meeting {
 public:
  /// If `beyond` is given, it is asked once per meeting, with the value on which the members
  /// agreed.
  Meeting(Reactor& reactor, int members, Quorum* beyond = nullptr);

  enum class Call { kMin, kMax, kBarrier };
  Task<std::uint64_t> meet(Call call, std::uint64_t value);

  /// Handles the loss of a member: everything that waits for it, now or later, gets `error`.
  void lose(const std::exception_ptr& error);
  int members() const noexcept { return members_; }

 private:
  struct Round {
    explicit Round(Reactor& reactor) : complete(reactor) {}
    Call call = Call::kBarrier;
    int arrived = 0;
    std::uint64_t agreed = 0;
    Signal complete;
  };
  Task<> close(Round& round);

  Reactor& reactor_;
  int members_;
  Quorum* beyond_;
  std::shared_ptr<Round> round_;
  std::exception_ptr lost_;
};

/// One member's view of a meeting. It has its own rank and world size, and agrees through the
/// meeting.
class MeetingQuorum final : public Quorum {
 public:
  MeetingQuorum(Meeting& meeting, int rank, int world_size)
      : meeting_(meeting), rank_(rank), world_size_(world_size) {}
  int rank() const noexcept override { return rank_; }
  int world_size() const noexcept override { return world_size_; }
  Task<std::uint64_t> min(std::uint64_t value) override {
    return meeting_.meet(Meeting::Call::kMin, value);
  }
  Task<std::uint64_t> max(std::uint64_t value) override {
    return meeting_.meet(Meeting::Call::kMax, value);
  }
  Task<> barrier() override { co_await meeting_.meet(Meeting::Call::kBarrier, 0); }

 private:
  Meeting& meeting_;
  int rank_;
  int world_size_;
};

}  // namespace ziggurat
