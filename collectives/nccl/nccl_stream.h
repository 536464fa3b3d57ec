// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_stream.h: the stream of a GPU's lane, the stage beside it, and waits for
// NCCL that can be ended.
//
// No function blocks in the driver while NCCL waits for another rank: the thread asks again and
// again. Used by the lane's thread only, except for give_up().
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/nccl/nccl_device.h"
#include "collectives/nccl/nccl_library.h"

namespace ziggurat {

/// A communicator of NCCL.
struct NcclGroup {
  ncclComm_t handle = nullptr;
  std::size_t rank = 0;
  std::size_t world = 1;
};

class NcclStream {
 public:
  static constexpr std::size_t kStageBytes = kNcclStageBytes / 2;  // size of each of the two
                                                                   // stages, in and out

  NcclStream(std::shared_ptr<const NcclLibrary> nccl, int gpu, Nanoseconds timeout)
      : nccl_(std::move(nccl)), gpu_(gpu), timeout_(timeout) {}

  /// Makes the stream and the stage at the first call.
  void open();
  void give_up() noexcept { given_up_ = true; }
  NcclDevice::Group join(const NcclDevice::Id& id, NcclDevice::Place place);
  const NcclGroup& group(NcclDevice::Group number) const { return groups_.at(number); }

  /// Waits until the call's bytes are there. `result` is what the call `what` returned.
  void finish_call(const NcclGroup& group, ncclResult_t result, const char* what);
  /// Runs `body` between ncclGroupStart and ncclGroupEnd, which is called even if `body` throws.
  /// Then waits until the bytes are there.
  void grouped(const NcclGroup& group, const char* what, const std::function<void()>& body);
  /// Queues a copy, which is done after copied().
  void copy(std::byte* to, const std::byte* from, std::size_t length);
  void copied();

  /// Ends all groups in the order in which they were joined, which is the same on all ranks.
  void finish();
  void abort() noexcept;
  void release() noexcept;

  const NcclLibrary& nccl() const noexcept { return *nccl_; }
  cudaStream_t stream() const noexcept { return stream_; }
  std::byte* stage_in() const noexcept { return stage_in_; }
  std::byte* stage_out() const noexcept { return stage_out_; }

 private:
  void settle(ncclComm_t handle, ncclResult_t result, const char* what, Nanoseconds most);
  void pause(Nanoseconds since, const char* what, Nanoseconds most) const;

  std::shared_ptr<const NcclLibrary> nccl_;
  int gpu_;
  Nanoseconds timeout_;
  std::vector<NcclGroup> groups_;  // handles of groups that have ended are null
  cudaStream_t stream_ = nullptr;
  std::byte* stage_in_ = nullptr;
  std::byte* stage_out_ = nullptr;
  std::atomic<bool> given_up_{false};
};

}  // namespace ziggurat
