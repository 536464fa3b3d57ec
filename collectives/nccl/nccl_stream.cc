// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_stream.cc: asks NCCL for its state until that changes.
#include "collectives/nccl/nccl_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

/// Few blocks, so that a kernel of NCCL's leaves room for those of the trainer.
constexpr int kBlocksMax = 8;
constexpr auto kAskAgain = std::chrono::microseconds(20);
/// How long a group may take to end when all ranks have come to end it: nothing is under way any
/// more.
constexpr Nanoseconds kFinishMost = std::chrono::seconds(10);
/// How long the GPU may take to stop what was aborted.
constexpr Nanoseconds kDrainMost = std::chrono::seconds(10);

double seconds(Nanoseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

void NcclStream::open() {
  if (given_up_)
    throw Error(ErrorCode::kUnavailable, "the NCCL stream was given up, because a rank failed");
  check_cuda(cudaSetDevice(gpu_), "cudaSetDevice");
  if (stream_ == nullptr) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
  }
  for (std::byte** const stage : {&stage_in_, &stage_out_}) {
    if (*stage != nullptr) continue;
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, kStageBytes), "cudaMalloc of NCCL's stage");
    *stage = static_cast<std::byte*>(memory);
  }
}

NcclDevice::Group NcclStream::join(const NcclDevice::Id& id, NcclDevice::Place place) {
  static_assert(sizeof(ncclUniqueId) == sizeof(NcclDevice::Id));
  ncclUniqueId unique{};
  std::memcpy(&unique, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = kBlocksMax;
  groups_.push_back(
      {nullptr, static_cast<std::size_t>(place.rank), static_cast<std::size_t>(place.world_size)});
  ncclComm_t& handle = groups_.back().handle;
  const ncclResult_t result =
      nccl_->ncclCommInitRankConfig_(&handle, place.world_size, unique, place.rank, &config);
  settle(handle, result, "ncclCommInitRankConfig", timeout_);
  return groups_.size() - 1;
}

/// Waits until NCCL has accepted the call.
void NcclStream::settle(ncclComm_t handle, ncclResult_t result, const char* what,
                        Nanoseconds most) {
  const Nanoseconds begin = monotonic_now();
  nccl_->check(result, what);
  while (result == ncclInProgress) {
    nccl_->check(nccl_->ncclCommGetAsyncError_(handle, &result), what);
    nccl_->check(result, what);
    if (result == ncclInProgress) pause(begin, what, most);
  }
}

void NcclStream::finish_call(const NcclGroup& group, ncclResult_t result, const char* what) {
  settle(group.handle, result, what, timeout_);
  const Nanoseconds begin = monotonic_now();
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state != cudaErrorNotReady) check_cuda(state, what);
    // After an error, a stream that is done has wrong bytes.
    ncclResult_t health = ncclSuccess;
    nccl_->check(nccl_->ncclCommGetAsyncError_(group.handle, &health), what);
    nccl_->check(health, what);
    if (state == cudaSuccess) return;
    pause(begin, what, timeout_);
  }
}

void NcclStream::grouped(const NcclGroup& group, const char* what,
                         const std::function<void()>& body) {
  nccl_->check(nccl_->ncclGroupStart_(), "ncclGroupStart");
  try {
    body();
  } catch (...) {
    nccl_->ncclGroupEnd_();  // otherwise the thread's next calls would belong to the group
    throw;
  }
  finish_call(group, nccl_->ncclGroupEnd_(), what);
}

void NcclStream::copy(std::byte* to, const std::byte* from, std::size_t length) {
  if (length == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, length, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
}

/// Waits for the copies, and for nothing else: no operation of NCCL's is on the stream.
void NcclStream::copied() { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

void NcclStream::pause(Nanoseconds since, const char* what, Nanoseconds most) const {
  if (given_up_) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("{} was given up, because a rank failed", what));
  }
  if (monotonic_now() - since > most) {
    throw Error(ErrorCode::kDeadlineExceeded,
                fmt::format("{} stood still for the {:.1f} s that ranks may take "
                            "(ZIGGURAT_RANK_TIMEOUT); NCCL_DEBUG=INFO shows what it waits for",
                            what, seconds(most)));
  }
  std::this_thread::sleep_for(kAskAgain);
}

void NcclStream::finish() {
  for (NcclGroup& group : groups_) {
    if (group.handle == nullptr) continue;
    settle(group.handle, nccl_->ncclCommFinalize_(group.handle), "ncclCommFinalize",
           std::min(timeout_, kFinishMost));
    nccl_->check(nccl_->ncclCommDestroy_(group.handle), "ncclCommDestroy");
    group.handle = nullptr;
  }
}

void NcclStream::abort() noexcept {
  for (NcclGroup& group : groups_) {
    if (group.handle == nullptr) continue;
    const ncclResult_t result = nccl_->ncclCommAbort_(std::exchange(group.handle, nullptr));
    if (result != ncclSuccess) {
      log().warn("ncclCommAbort: {}", nccl_->ncclGetErrorString_(result));
    }
  }
  // The stream may still have copies into callers' memory behind what was aborted.
  const Nanoseconds begin = monotonic_now();
  while (stream_ != nullptr && cudaStreamQuery(stream_) == cudaErrorNotReady) {
    if (monotonic_now() - begin > kDrainMost) {
      log().warn(
          "cuda{} has not stopped {:.0f} s after ncclCommAbort: it may still write to the "
          "buffers of the call that failed, so end this process",
          gpu_, seconds(kDrainMost));
      return;
    }
    std::this_thread::sleep_for(kAskAgain);
  }
}

void NcclStream::release() noexcept {
  const auto end = [](cudaError_t error, const char* what) {
    if (error != cudaSuccess) log().info("{}: {}", what, cudaGetErrorString(error));
  };
  for (std::byte** const stage : {&stage_in_, &stage_out_}) {
    if (*stage != nullptr) end(cudaFree(std::exchange(*stage, nullptr)), "cudaFree");
  }
  if (stream_ != nullptr) {
    end(cudaStreamDestroy(std::exchange(stream_, nullptr)), "cudaStreamDestroy");
  }
}

}  // namespace ziggurat
