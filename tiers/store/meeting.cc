// SPDX-License-Identifier: Apache-2.0
// tiers/store/meeting.cc: the last member to arrive closes the round. If there is a quorum beyond
// the meeting, it asks that too.
#include "tiers/store/meeting.h"

#include <algorithm>

#include "base/check.h"

namespace ziggurat {

Meeting::Meeting(Reactor& reactor, int members, Quorum* beyond)
    : reactor_(reactor),
      members_(members),
      beyond_(beyond),
      round_(std::make_shared<Round>(reactor)) {}

Task<std::uint64_t> Meeting::meet(Call call, std::uint64_t value) {
  if (lost_) std::rethrow_exception(lost_);
  const std::shared_ptr<Round> round = round_;
  ZIGGURAT_CHECK(round->arrived == 0 || round->call == call, "members call in different orders");
  if (round->arrived == 0) {
    round->agreed = value;
  } else {
    round->agreed =
        call == Call::kMin ? std::min(round->agreed, value) : std::max(round->agreed, value);
  }
  round->call = call;
  if (++round->arrived == members_) {
    round_ = std::make_shared<Round>(reactor_);
    co_await close(*round);
  }
  co_await round->complete.wait();
  co_return round->agreed;
}

Task<> Meeting::close(Round& round) {
  std::exception_ptr error;
  try {
    if (beyond_ != nullptr) {
      switch (round.call) {
        case Call::kMin: round.agreed = co_await beyond_->min(round.agreed); break;
        case Call::kMax: round.agreed = co_await beyond_->max(round.agreed); break;
        case Call::kBarrier: co_await beyond_->barrier(); break;
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    round.complete.fail(error);
  } else {
    round.complete.set();
  }
}

void Meeting::lose(const std::exception_ptr& error) {
  if (lost_) return;
  lost_ = error;
  round_->complete.fail(error);
}

}  // namespace ziggurat
