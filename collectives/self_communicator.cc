// SPDX-License-Identifier: Apache-2.0
// collectives/self_communicator.cc: nothing here waits.
#include "collectives/self_communicator.h"

#include <fmt/format.h>

#include <cstring>

#include "base/error.h"

namespace ziggurat {
namespace {

void copy_exactly(const char* call, std::span<const std::byte> input, std::span<std::byte> output) {
  if (input.size() != output.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} bytes in and {} bytes out on one rank: they must be as many",
                            call, input.size(), output.size()));
  }
  // Buffers may overlap, or be the same one.
  if (input.data() != output.data() && !input.empty()) {
    std::memmove(output.data(), input.data(), input.size());
  }
}

}  // namespace

Task<> SelfCommunicator::all_gather(std::span<const std::byte> input, std::span<std::byte> output) {
  check_alive();
  copy_exactly("all_gather", input, output);
  co_return;
}

Task<> SelfCommunicator::reduce_scatter(std::span<const std::byte> input,
                                        std::span<std::byte> output, DType dtype) {
  check_alive();
  if (input.size() % size_bytes(dtype) != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("reduce_scatter: {} bytes are not whole elements of {}", input.size(),
                            to_string(dtype)));
  }
  copy_exactly("reduce_scatter", input, output);  // a sum of one term keeps its bits
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

Task<> SelfCommunicator::broadcast(std::span<std::byte>, int root) {
  check_alive();
  if (root != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("broadcast: root {} of 1 rank, counted from 0", root));
  }
  co_return;
}

Task<> SelfCommunicator::barrier() {
  check_alive();
  co_return;
}

void SelfCommunicator::abort(const std::string& reason) {
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
}

void SelfCommunicator::check_alive() const {
  if (aborted_) throw Error(ErrorCode::kUnavailable, "the ranks were told to stop: " + reason_);
}

}  // namespace ziggurat
