// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_device.h: NCCL on this rank's GPU, with all of this rank's NCCL
// communicators, which are called groups.
//
// NCCL forbids threads to call communicators of one device in parallel, and ranks that use them in
// different orders wait for each other for ever. So one thread makes every call of a device
// (nccl_lane.h), in an order that all ranks share (call_order.h).
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/runtime/clock.h"
#include "collectives/call.h"
#include "collectives/rank_options.h"

namespace ziggurat {

/// The size of the device memory through which bytes of the host pass. All groups of a rank share
/// it; it is outside every budget. NCCL's own buffers, some MB per group, come on top.
inline constexpr std::size_t kNcclStageBytes = std::size_t{64} << 20;

struct NcclOptions {
  Nanoseconds timeout{std::chrono::minutes(10)};  ///< for a call that stands still in NCCL
  Reduce reduce = Reduce::kRanks;
};

class NcclDevice {
 public:
  using Id = std::array<std::byte, 128>;  // ncclUniqueId
  using Group = std::size_t;
  struct Place {
    int rank = 0;
    int world_size = 1;
  };

  virtual ~NcclDevice() = default;

  // Any thread.
  /// Describes library and GPU: "NCCL 2.32.3 on cuda0".
  virtual std::string description() const = 0;
  /// Returns the version as ncclGetVersion gives it.
  virtual int version() const = 0;
  /// Returns the GPU's PCI address, "0000:3B:00.0", whatever its number among those that this
  /// process sees.
  virtual const std::string& gpu() const = 0;
  /// Returns whether NCCL can use these bytes where they are; always true for no bytes. Makes this
  /// device the thread's current one.
  virtual bool holds(std::span<const std::byte> bytes) const = 0;
  /// Makes calls under way fail soon, and all later calls.
  virtual void give_up() noexcept = 0;

  // Called on the lane's thread from here on. Errors of all: kUnavailable, and kDeadlineExceeded
  // for a call that stood still. The caller then aborts.
  virtual Id new_id() = 0;
  /// Joins a group. All members call this at once, with the id that one of them made.
  virtual Group join(const Id& id, Place place) = 0;
  /// Makes a call; returns when the bytes are there. With `direct` the bytes of all members are
  /// held by their GPUs; otherwise all pass through the stage.
  virtual void make(Group group, const Call& call, bool direct) = 0;
  /// Ends all groups in order, when no rank makes calls any more.
  virtual void finish() = 0;
  /// Ends the groups that finish() has not ended. Afterwards no caller's memory is written.
  virtual void abort() noexcept = 0;
  /// Gives back the stream and the stage, after finish() or abort().
  virtual void release() noexcept = 0;
};

/// Opens NCCL on the only visible GPU, or on the GPU with this rank's number on its host. Errors:
/// kUnavailable if the library, a driver or a GPU for each rank of this host is missing, naming
/// what is missing and where to get it; kUnimplemented in a build without NCCL.
std::unique_ptr<NcclDevice> open_nccl(const NcclOptions& options);

/// What `ziggurat doctor` shows of NCCL.
struct NcclInventory {
  std::string found;     ///< "2.27.3, /usr/lib/.../libnccl.so.2"; empty if there is none
  std::string why_none;  ///< empty if it is there
};
NcclInventory nccl_inventory();

}  // namespace ziggurat
