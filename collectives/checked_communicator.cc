// SPDX-License-Identifier: Apache-2.0
// collectives/checked_communicator.cc: checks sizes and ranks, and makes the facts on which ranks
// must agree.
#include "collectives/checked_communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

namespace ziggurat {
namespace {

/// Returns why these bytes are not whole elements; empty if they are.
std::string misfit_of_elements(const char* call, std::size_t bytes, DType dtype) {
  if (bytes % size_bytes(dtype) == 0) return {};
  return fmt::format("{}: {} bytes are not a whole number of elements of {}", call, bytes,
                     to_string(dtype));
}

/// Returns why `peer` cannot be sent to or received from; empty if it can.
std::string misfit_of_peer(const char* call, int peer, int rank, int world_size) {
  if (peer >= 0 && peer < world_size && peer != rank) return {};
  return fmt::format(
      "{}: rank {} of {} ranks is not a rank that rank {} can exchange with: name another rank, "
      "counting from 0",
      call, peer, world_size, rank);
}

CallSpec spec_of_values(CallElement element, Communicator::Op op, std::size_t count) {
  return {.kind = CallKind::kAllReduceValues,
          .element = element,
          .op = static_cast<std::uint8_t>(op),
          .count = count};
}

}  // namespace

Task<> CheckedCommunicator::failing(std::exception_ptr error) {
  std::rethrow_exception(error);
  co_return;
}

Task<> CheckedCommunicator::begin(const std::string& misfit, const Call& call) {
  if (!misfit.empty()) return refuse(Error(ErrorCode::kInvalidArgument, misfit));
  return issue(call);
}

Task<> CheckedCommunicator::all_gather(std::span<const std::byte> input,
                                       std::span<std::byte> output) {
  const std::size_t all = input.size() * static_cast<std::size_t>(world_size());
  std::string misfit;
  if (output.size() != all) {
    misfit = fmt::format(
        "all_gather: the input has {} bytes and the output {} on {} ranks, but the output must "
        "have {}",
        input.size(), output.size(), world_size(), all);
  }
  return begin(misfit, {.spec = {.kind = CallKind::kAllGather, .count = input.size()},
                        .input = input,
                        .output = output});
}

Task<> CheckedCommunicator::reduce_scatter(std::span<const std::byte> input,
                                           std::span<std::byte> output, DType dtype) {
  const std::size_t all = output.size() * static_cast<std::size_t>(world_size());
  std::string misfit = misfit_of_elements("reduce_scatter", output.size(), dtype);
  if (misfit.empty() && input.size() != all) {
    misfit = fmt::format(
        "reduce_scatter: the input has {} bytes and the output {} on {} ranks, but the input must "
        "have "
        "{}",
        input.size(), output.size(), world_size(), all);
  }
  return begin(misfit, {.spec = {.kind = CallKind::kReduceScatter,
                                 .element = element_of(dtype),
                                 .count = output.size() / size_bytes(dtype)},
                        .input = input,
                        .output = output});
}

Task<> CheckedCommunicator::all_reduce(std::span<std::byte> values, DType dtype) {
  return begin(misfit_of_elements("all_reduce", values.size(), dtype),
               {.spec = {.kind = CallKind::kAllReduce,
                         .element = element_of(dtype),
                         .count = values.size() / size_bytes(dtype)},
                .input = values,
                .output = values});
}

Task<> CheckedCommunicator::all_reduce(std::span<double> values, Op op) {
  const auto bytes = std::as_writable_bytes(values);
  return begin({}, {.spec = spec_of_values(CallElement::kFloat64, op, values.size()),
                    .input = bytes,
                    .output = bytes});
}

Task<> CheckedCommunicator::all_reduce(std::span<std::uint64_t> values, Op op) {
  const auto bytes = std::as_writable_bytes(values);
  return begin({}, {.spec = spec_of_values(CallElement::kUInt64, op, values.size()),
                    .input = bytes,
                    .output = bytes});
}

Task<> CheckedCommunicator::all_to_all(std::span<const std::byte> input,
                                       std::span<std::byte> output) {
  const auto world = static_cast<std::size_t>(world_size());
  std::string misfit;
  if (input.size() != output.size() || input.size() % world != 0) {
    misfit = fmt::format(
        "all_to_all: the input has {} bytes and the output {} on {} ranks, but both must have the "
        "same "
        "size, a multiple of {}",
        input.size(), output.size(), world, world);
  }
  return begin(misfit, {.spec = {.kind = CallKind::kAllToAll, .count = input.size() / world},
                        .input = input,
                        .output = output});
}

Task<> CheckedCommunicator::barrier() { return begin({}, {.spec = {.kind = CallKind::kBarrier}}); }

Task<> CheckedCommunicator::send(std::span<const std::byte> bytes, int to) {
  return begin(misfit_of_peer("send", to, rank(), world_size()),
               {.spec = {.kind = CallKind::kSend, .count = bytes.size()},
                .input = bytes,
                .output = {},
                .peer = to});
}

Task<> CheckedCommunicator::recv(std::span<std::byte> bytes, int from) {
  return begin(misfit_of_peer("recv", from, rank(), world_size()),
               {.spec = {.kind = CallKind::kRecv, .count = bytes.size()},
                .input = {},
                .output = bytes,
                .peer = from});
}

int CheckedCommunicator::place_in(std::span<const int> members) const {
  const bool ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  const auto own = std::find(members.begin(), members.end(), rank());
  if (members.empty() || !ascending || members.front() < 0 || members.back() >= world_size() ||
      own == members.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("split: members [{}] do not fit rank {} of {} ranks; give ascending "
                            "ranks that include this rank",
                            fmt::join(members, ", "), rank(), world_size()));
  }
  return static_cast<int>(own - members.begin());
}

}  // namespace ziggurat
