// SPDX-License-Identifier: Apache-2.0
// collectives/communicator.h: what ranks say to each other. Back-ends: self_communicator.h (one
// rank); more will stand beside it.
//
// Every rank issues the same calls in the same order per communicator. Sums are taken in rank order
// in fp32 and rounded once, so that transport and bucket size cannot change bits. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int world_size() const noexcept = 0;

  /// Shapes: input [n] bytes, output [world_size * n] bytes; output slice r is rank r's input.
  virtual Task<> all_gather(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  /// Shapes: input [world_size * n] of `dtype`, output [n]: this rank's slice of the sum over
  /// ranks.
  virtual Task<> reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                                DType dtype) = 0;

  enum class Op : std::uint8_t { kSum, kMin, kMax };
  /// In place, element-wise over ranks. Sums in rank order.
  virtual Task<> all_reduce(std::span<double> values, Op op) = 0;
  virtual Task<> all_reduce(std::span<std::uint64_t> values, Op op) = 0;
  /// `root`'s bytes to all.
  virtual Task<> broadcast(std::span<std::byte> bytes, int root) = 0;
  virtual Task<> barrier() = 0;

  /// Every pending and later call on every rank fails with kUnavailable and `reason`.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace ziggurat
