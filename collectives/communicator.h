// SPDX-License-Identifier: Apache-2.0
// collectives/communicator.h: the operations by which ranks exchange bytes. Back-ends are in
// folders beside this file and pass one conformance suite.
//
// Every rank issues the same calls in the same order per communicator. A call is numbered and
// begins when it is made. Its Task, which the caller awaits, ends when the call ends, so several
// calls may be under way at once. Buffers belong to the call until it ends. Sums are taken in rank
// order in fp32 and rounded once, so that transport and bucket size cannot change bits; a back-end
// that lets another library choose the order (nccl) says so in its description(). Reactor's thread.
//
// Errors of every call: kInvalidArgument for shapes that do not fit, and on every rank if ranks
// made different calls, naming both; kUnavailable for a rank that is gone and after abort();
// kDeadlineExceeded for a rank that did not come. After any of these, the communicator and its
// relatives by split() cannot be used any more, on any rank.
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

/// What a rank has sent, and how long it has waited, since its ranks were connected. Relatives by
/// split() are counted together.
struct Traffic {
  struct Sent {
    std::uint64_t payload_bytes = 0;
    std::uint64_t frame_bytes = 0;  ///< bytes around the payload: headers, checksums
  };
  Sent same_host;
  Sent other_hosts;
  /// The time from each call until the first bytes of another rank's part came, by that rank's
  /// number in the first communicator.
  std::vector<Nanoseconds> waited;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int world_size() const noexcept = 0;

  /// Gathers all inputs on all ranks. Shapes: input [n] bytes, output [world_size * n] bytes;
  /// output slice r is rank r's input. This rank's input may already lie in its slice.
  virtual Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  /// Sums over ranks and gives each rank a slice. Shapes: input [world_size * n] of `dtype`, output
  /// [n]: this rank's slice of the sum. Output may be that slice of the input.
  virtual Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                                DType dtype) = 0;
  /// Sums any number of elements over ranks, in place. The bits are those of reduce_scatter and
  /// all_gather.
  virtual Task<> all_reduce(std::span<std::byte> values, DType dtype) = 0;

  enum class Op : std::uint8_t { kSum, kMin, kMax };
  /// Combines a few values over ranks, element by element and in place. Sums are taken in rank
  /// order.
  virtual Task<> all_reduce(std::span<double> values, Op op) = 0;
  virtual Task<> all_reduce(std::span<std::uint64_t> values, Op op) = 0;
  /// Exchanges slices. Shapes: input and output [world_size * n] bytes, which do not overlap; slice
  /// r of the input goes to rank r, and slice r of the output comes from rank r.
  virtual Task<> all_to_all(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  virtual Task<> barrier() = 0;

  /// Sends to one other rank, whose recv() of the same size receives the bytes. These calls are
  /// numbered by pair and direction, apart from the calls of all ranks.
  virtual Task<> send(std::span<const std::byte> bytes, int to) = 0;
  virtual Task<> recv(std::span<std::byte> bytes, int from) = 0;
  /// Runs `hear`, on the reactor's thread, for every send() to this rank that comes before its
  /// recv(); the caller then makes that recv(). For code that answers requests whenever they come,
  /// and must not count as waiting for them. Sends that have come already are reported at once. An
  /// empty `hear` ends it.
  virtual void on_send(std::function<void(int from)> hear) = 0;

  /// Makes a communicator of some of these ranks, numbered by their place in `members` (ascending
  /// ranks of this communicator, perhaps all). Every member calls this with the same list; other
  /// ranks need not. Nothing is sent. The new communicator uses the same transport and numbers its
  /// calls on its own.
  virtual std::unique_ptr<Communicator> split(std::span<const int> members) = 0;

  virtual Traffic traffic() const = 0;
  /// Returns what carries the bytes, and in whose order sums are taken if not in rank order.
  virtual std::string description() const = 0;

  /// Makes every pending and later call on every rank fail with kUnavailable and `reason`.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace ziggurat
