// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_communicator.h: ranks with a GPU each, over NCCL; what NCCL cannot promise
// comes from sockets beside it.
//
// NCCL takes a call on trust: ranks that make different ones hang or mix their data, and so do
// those that make the same ones in another order. So each call is announced over sockets first, and
// given to NCCL, on a thread and a stream of its communicator, in the order of its numbers, when
// every member has announced the same. Sockets also carry what is small, what wants the order of
// ranks (doubles, integers), send and recv, and the news that a rank is gone, on which what is
// under way at NCCL is aborted.
//
// Sums of all_reduce and reduce_scatter are NCCL's: in its own order, so their bits differ from
// those of other back-ends, and may differ with the number of ranks, the machine and NCCL's
// version. Reactor's thread.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/runtime/clock.h"
#include "collectives/communicator.h"
#include "collectives/exchange/exchange_communicator.h"

namespace ziggurat {

/// One NCCL communicator of some ranks. One thread calls it, but for abort(). Each call returns
/// when its bytes are there. Errors: kUnavailable.
class NcclGroup {
 public:
  using Id = std::array<std::byte, 128>;  // ncclUniqueId

  virtual ~NcclGroup() = default;
  /// All members at once, with the id that one of them made.
  virtual void join(const Id& id, int place, int world_size) = 0;
  virtual void all_gather(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  virtual void reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                              DType dtype) = 0;
  virtual void all_reduce(std::span<std::byte> values, DType dtype) = 0;
  virtual void all_to_all(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  virtual void broadcast(std::span<std::byte> bytes, int root) = 0;
  /// Any thread: what is under way fails soon, and everything after it.
  virtual void abort() noexcept = 0;
};

/// NCCL and this rank's GPU.
class NcclDevice {
 public:
  virtual ~NcclDevice() = default;
  virtual NcclGroup::Id new_id() = 0;
  virtual std::unique_ptr<NcclGroup> new_group() = 0;
  /// "NCCL 2.27.3 on cuda0".
  virtual std::string description() const = 0;
};

/// What `ziggurat doctor` shows. Never throws.
struct NcclInventory {
  std::string found;     ///< "2.27.3, /usr/lib/.../libnccl.so.2"; empty: none
  std::string why_none;  ///< empty: it is there
};
NcclInventory nccl_inventory();

/// `timeout` is for a call that stands still at NCCL. Errors: kUnavailable without the library, a
/// driver or a GPU for each rank of this host, naming what is missing and where to get it;
/// kUnimplemented in a build without NCCL.
std::shared_ptr<NcclDevice> open_nccl(Nanoseconds timeout);

/// A communicator of the ranks of `transport`, which is its own from here on.
std::unique_ptr<Communicator> over_nccl(std::shared_ptr<ExchangeTransport> transport,
                                        std::shared_ptr<NcclDevice> device);

}  // namespace ziggurat
