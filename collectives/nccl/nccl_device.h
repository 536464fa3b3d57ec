// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_device.h: NCCL on this rank's GPU, with all of this rank's NCCL
// communicators, here called groups.
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

/// Device memory that bytes of the host pass through: for all groups of a rank together, outside
/// every budget. NCCL's own buffers, some MB a group, come on top.
inline constexpr std::size_t kNcclStageBytes = std::size_t{64} << 20;

struct NcclOptions {
  Nanoseconds timeout{std::chrono::minutes(10)};  ///< for a call that stands still at NCCL
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
  /// "NCCL 2.32.3 on cuda0".
  virtual std::string description() const = 0;
  /// As ncclGetVersion has it.
  virtual int version() const = 0;
  /// "0000:3B:00.0", whatever number it has among those that this process sees.
  virtual const std::string& gpu() const = 0;
  /// Whether NCCL can take these bytes as they are: always, if there are none. The thread has this
  /// device from then on.
  virtual bool holds(std::span<const std::byte> bytes) const = 0;
  /// What is under way fails soon, and everything after it.
  virtual void give_up() noexcept = 0;

  // The lane's thread. Errors of all: kUnavailable, and kDeadlineExceeded for what stood still. The
  // caller aborts then.
  virtual Id new_id() = 0;
  /// All members at once, with the id that one of them made.
  virtual Group join(const Id& id, Place place) = 0;
  /// Returns when the bytes are there. `direct`: all members' bytes are held by their GPUs; else
  /// all pass through the stage.
  virtual void make(Group group, const Call& call, bool direct) = 0;
  /// The orderly end of all groups, when no rank calls any more.
  virtual void finish() = 0;
  /// The end of what finish() has not ended. Afterwards nothing is written to anybody's memory.
  virtual void abort() noexcept = 0;
  /// After either: gives back the stream and the stage.
  virtual void release() noexcept = 0;
};

/// The GPU is the one that is visible, or that of this rank's number on its host. Errors:
/// kUnavailable without the library, a driver or a GPU for each rank of this host, naming what is
/// missing and where to get it; kUnimplemented in a build without NCCL.
std::unique_ptr<NcclDevice> open_nccl(const NcclOptions& options);

/// What `ziggurat doctor` shows. Never throws.
struct NcclInventory {
  std::string found;     ///< "2.27.3, /usr/lib/.../libnccl.so.2"; empty: none
  std::string why_none;  ///< empty: it is there
};
NcclInventory nccl_inventory();

}  // namespace ziggurat
