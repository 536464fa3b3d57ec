// SPDX-License-Identifier: Apache-2.0
// collectives/self_communicator.cc: nothing here waits.
#include "collectives/self_communicator.h"

#include <cstring>

#include "base/error.h"
#include "collectives/call_shape.h"

namespace ziggurat {
namespace {

void copy(std::span<const std::byte> input, std::span<std::byte> output) {
  // Buffers may overlap, or be the same one.
  if (input.data() != output.data() && !input.empty()) {
    std::memmove(output.data(), input.data(), input.size());
  }
}

}  // namespace

Task<> SelfCommunicator::all_gather(std::span<const std::byte> input, std::span<std::byte> output) {
  check_alive();
  check_all_gather(input.size(), output.size(), 1);
  copy(input, output);
  co_return;
}

Task<> SelfCommunicator::reduce_scatter(std::span<const std::byte> input,
                                        std::span<std::byte> output, DType dtype) {
  check_alive();
  check_reduce_scatter(input.size(), output.size(), dtype, 1);
  copy(input, output);  // a sum of one term keeps its bits
  co_return;
}

Task<> SelfCommunicator::all_reduce(std::span<std::byte> values, DType dtype) {
  check_alive();
  check_all_reduce(values.size(), dtype);
  co_return;
}

Task<> SelfCommunicator::all_reduce(std::span<double>, Op) {
  check_alive();
  co_return;
}

Task<> SelfCommunicator::all_reduce(std::span<std::uint64_t>, Op) {
  check_alive();
  co_return;
}

Task<> SelfCommunicator::all_to_all(std::span<const std::byte> input, std::span<std::byte> output) {
  check_alive();
  check_all_to_all(input.size(), output.size(), 1);
  copy(input, output);
  co_return;
}

Task<> SelfCommunicator::broadcast(std::span<std::byte>, int root) {
  check_alive();
  check_root(root, 1);
  co_return;
}

Task<> SelfCommunicator::barrier() {
  check_alive();
  co_return;
}

Task<> SelfCommunicator::send(std::span<const std::byte>, int to) {
  check_alive();
  check_peer("send", to, 0, 1);
  co_return;
}

Task<> SelfCommunicator::recv(std::span<std::byte>, int from) {
  check_alive();
  check_peer("recv", from, 0, 1);
  co_return;
}

std::unique_ptr<Communicator> SelfCommunicator::split(std::span<const int> members) {
  check_members(members, 0, 1);
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
    throw Error(ErrorCode::kUnavailable, "the ranks were told to stop: " + fate_->reason);
  }
}

}  // namespace ziggurat
