// SPDX-License-Identifier: Apache-2.0
// collectives/self_communicator.cc: nothing here waits.
#include "collectives/self_communicator.h"

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {

Task<> SelfCommunicator::run(Call call) {
  check_alive();
  switch (call.spec.kind) {
    case CallKind::kAllGather:
    case CallKind::kReduceScatter:  // a sum of one term keeps its bits
    case CallKind::kAllToAll: copy_bytes(call.input, call.output); break;
    case CallKind::kAllReduce:
    case CallKind::kAllReduceValues:
    case CallKind::kBarrier: break;
    case CallKind::kSend:
    case CallKind::kRecv: break;  // refused before, because there is no other rank
  }
  co_return;
}

std::unique_ptr<Communicator> SelfCommunicator::split(std::span<const int> members) {
  place_in(members);
  auto same = std::make_unique<SelfCommunicator>();
  same->fate_ = fate_;
  return same;
}

Traffic SelfCommunicator::traffic() const {
  Traffic none;
  none.waited.resize(1);
  return none;
}

void SelfCommunicator::abort(const std::string& reason) {
  if (fate_->aborted) return;
  *fate_ = {true, reason};
}

void SelfCommunicator::check_alive() const {
  if (fate_->aborted) {
    throw Error(ErrorCode::kUnavailable, "the calls of all ranks were aborted: " + fate_->reason);
  }
}

}  // namespace ziggurat
