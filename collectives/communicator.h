// SPDX-License-Identifier: Apache-2.0
// collectives/communicator.h: what ranks say to each other. Back-ends stand beside this file and
// pass one conformance suite.
//
// Every rank issues the same calls in the same order per communicator. A call is numbered, and
// begins, when it is made; the Task it returns ends with it, so several may be under way at once.
// That Task is awaited; buffers are the call's until it ends. Sums are taken in rank order in fp32
// and rounded once, so that transport and bucket size cannot change bits; a back-end that leaves
// sums to somebody else's order (nccl) says so in its description(). Reactor's thread.
//
// Errors of every call: kInvalidArgument for shapes that do not fit, and on every rank where ranks
// made different calls, naming both; kUnavailable for a rank that is gone and after abort();
// kDeadlineExceeded for a rank that did not come. After any of them the communicator, its relatives
// by split() included, is of no more use, on any rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

/// What a rank sent, and how long it stood waiting, since its ranks were connected. Relatives by
/// split() count together.
struct Traffic {
  struct Sent {
    std::uint64_t payload_bytes = 0;
    std::uint64_t frame_bytes = 0;  ///< around the payload: headers, checksums
  };
  Sent same_host;
  Sent other_hosts;
  /// By rank of the first communicator: from each call until that rank's part of it began to come.
  std::vector<Nanoseconds> waited;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int world_size() const noexcept = 0;

  /// Shapes: input [n] bytes, output [world_size * n] bytes; output slice r is rank r's input,
  /// which may already lie there.
  virtual Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  /// Shapes: input [world_size * n] of `dtype`, output [n]: this rank's slice of the sum over
  /// ranks. Output may be that slice of the input.
  virtual Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                                DType dtype) = 0;
  /// In place: the sum over ranks, of any number of elements. The bits of reduce_scatter and
  /// all_gather.
  virtual Task<> all_reduce(std::span<std::byte> values, DType dtype) = 0;

  enum class Op : std::uint8_t { kSum, kMin, kMax };
  /// In place, element-wise over ranks. Sums in rank order. For a few values.
  virtual Task<> all_reduce(std::span<double> values, Op op) = 0;
  virtual Task<> all_reduce(std::span<std::uint64_t> values, Op op) = 0;
  /// Shapes: input and output [world_size * n] bytes; slice r of the input goes to rank r, slice r
  /// of the output comes from it. They do not overlap.
  virtual Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  /// `root`'s bytes to all.
  virtual Task<> broadcast(std::span<std::byte> bytes, int root) = 0;
  virtual Task<> barrier() = 0;

  /// To one other rank, whose recv() of as many bytes takes them. Numbered by pair and direction,
  /// apart from the calls of all.
  virtual Task<> send(std::span<const std::byte> bytes, int to) = 0;
  virtual Task<> recv(std::span<std::byte> bytes, int from) = 0;
  /// Runs `hear`, on the reactor's thread, for every send() to this rank that comes before its
  /// recv(), which is then to be made: for who answers requests whenever they come, and must not be
  /// seen waiting for them. Those that have come already are heard of at once. Nothing: no more.
  virtual void on_send(std::function<void(int from)> hear) = 0;

  /// A communicator of some of these ranks, numbered by their place in `members` (ascending ranks
  /// of this one, all of them perhaps). Every member calls it with the same list, others need not;
  /// nothing is sent. Same transport, calls numbered on their own.
  virtual std::unique_ptr<Communicator> split(std::span<const int> members) = 0;

  virtual Traffic traffic() const = 0;
  /// What carries it, and in whose order sums are taken where that is not the order of ranks.
  virtual std::string description() const = 0;

  /// Every pending and later call on every rank fails with kUnavailable and `reason`.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace ziggurat
