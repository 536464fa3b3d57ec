// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_device.cc: NCCL opened at run time, and its calls on a stream of a GPU.
//
// NCCL wants memory of the device. Host memory goes through a buffer there, piece by piece; what
// lies on the device already goes as it is. Nothing here blocks in the driver while NCCL waits for
// another rank: the thread asks the stream again and again, so that it can be told to stop.
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "base/topology/core_budget.h"
#include "collectives/nccl/nccl_communicator.h"
#include "collectives/shared_library.h"

namespace ziggurat {
namespace {

constexpr std::size_t kStageBytes = 32 * kMiB;  // twice: in and out
/// Few, so that kernels of all communicators fit on the GPU at once: one that must wait for room
/// could wait for one that waits for another rank.
constexpr int kBlocksMax = 8;
constexpr auto kAskAgain = std::chrono::microseconds(20);

static_assert(sizeof(ncclUniqueId) == sizeof(NcclGroup::Id));

struct Functions {
  SharedLibrary library;
#define ZIGGURAT_NCCL(name) decltype(&::name) name##_ = library.function<decltype(&::name)>(#name)
  ZIGGURAT_NCCL(ncclGetVersion);
  ZIGGURAT_NCCL(ncclGetUniqueId);
  ZIGGURAT_NCCL(ncclGetErrorString);
  ZIGGURAT_NCCL(ncclCommInitRankConfig);
  ZIGGURAT_NCCL(ncclCommGetAsyncError);
  ZIGGURAT_NCCL(ncclCommAbort);
  ZIGGURAT_NCCL(ncclAllGather);
  ZIGGURAT_NCCL(ncclReduceScatter);
  ZIGGURAT_NCCL(ncclAllReduce);
  ZIGGURAT_NCCL(ncclBroadcast);
  ZIGGURAT_NCCL(ncclSend);
  ZIGGURAT_NCCL(ncclRecv);
  ZIGGURAT_NCCL(ncclGroupStart);
  ZIGGURAT_NCCL(ncclGroupEnd);
#undef ZIGGURAT_NCCL
};

std::shared_ptr<const Functions> open_library() {
  return std::shared_ptr<const Functions>(new Functions{SharedLibrary::open(
      own_library_names("libnccl.so.2"),
      "install NCCL 2 for this CUDA (the Python wheel nvidia-nccl-cu13 has it: put its "
      "nvidia/nccl/lib into LD_LIBRARY_PATH), or use `collectives=auto`")});
}

std::string version_of(const Functions& nccl) {
  int code = 0;
  if (nccl.ncclGetVersion_(&code) != ncclSuccess) return "of unknown version";
  return fmt::format("{}.{}.{}", code / 10'000, code / 100 % 100, code % 100);
}

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)),
              static_cast<int>(error));
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return ncclFloat32;
    case DType::kBFloat16: return ncclBfloat16;
    case DType::kFloat16: return ncclFloat16;
  }
  return ncclFloat32;
}

bool on_device(const void* address) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

class GpuGroup final : public NcclGroup {
 public:
  GpuGroup(std::shared_ptr<const Functions> nccl, int gpu, Nanoseconds timeout)
      : nccl_(std::move(nccl)), gpu_(gpu), timeout_(timeout) {}
  ~GpuGroup() override {
    // Not in order: that waits for the others. What these return helps nobody any more.
    if (group_ != nullptr) nccl_->ncclCommAbort_(group_);
    if (stage_in_ != nullptr) cudaFree(stage_in_);
    if (stage_out_ != nullptr) cudaFree(stage_out_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  void join(const Id& id, int place, int world_size) override {
    place_ = place;
    world_ = static_cast<std::size_t>(world_size);
    check_cuda(cudaSetDevice(gpu_), "cudaSetDevice");
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&stage_in_), kStageBytes), "cudaMalloc");
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&stage_out_), kStageBytes), "cudaMalloc");
    ncclUniqueId unique{};
    std::memcpy(&unique, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = kBlocksMax;
    settle(nccl_->ncclCommInitRankConfig_(&group_, world_size, unique, place, &config),
           "ncclCommInitRank");
  }

  void all_gather(std::span<const std::byte> input, std::span<std::byte> output) override {
    const std::size_t n = input.size();
    if (n == 0) return;
    if (on_device(input.data()) && on_device(output.data())) {
      return call(nccl_->ncclAllGather_(input.data(), output.data(), n, ncclUint8, group_, stream_),
                  "ncclAllGather");
    }
    in_pieces(n, kStageBytes / world_, [&](std::size_t at, std::size_t length) {
      copy(stage_in_, input.data() + at, length);
      call(nccl_->ncclAllGather_(stage_in_, stage_out_, length, ncclUint8, group_, stream_),
           "ncclAllGather");
      for (std::size_t r = 0; r < world_; ++r) {
        copy(output.data() + r * n + at, stage_out_ + r * length, length);
      }
    });
  }

  void reduce_scatter(std::span<const std::byte> input, std::span<std::byte> output,
                      DType dtype) override {
    const std::size_t n = output.size();
    const auto sum = [&](const void* from, void* to, std::size_t length) {
      call(nccl_->ncclReduceScatter_(from, to, length / size_bytes(dtype), type_of(dtype), ncclSum,
                                     group_, stream_),
           "ncclReduceScatter");
    };
    if (n == 0) return;
    if (on_device(input.data()) && on_device(output.data())) {
      return sum(input.data(), output.data(), n);
    }
    in_pieces(n, kStageBytes / world_, [&](std::size_t at, std::size_t length) {
      for (std::size_t r = 0; r < world_; ++r) {
        copy(stage_in_ + r * length, input.data() + r * n + at, length);
      }
      sum(stage_in_, stage_out_, length);
      copy(output.data() + at, stage_out_, length);
    });
  }

  void all_reduce(std::span<std::byte> values, DType dtype) override {
    const auto sum = [&](void* at, std::size_t length) {
      call(nccl_->ncclAllReduce_(at, at, length / size_bytes(dtype), type_of(dtype), ncclSum,
                                 group_, stream_),
           "ncclAllReduce");
    };
    if (values.empty()) return;
    if (on_device(values.data())) return sum(values.data(), values.size());
    in_pieces(values.size(), kStageBytes, [&](std::size_t at, std::size_t length) {
      copy(stage_in_, values.data() + at, length);
      sum(stage_in_, length);
      copy(values.data() + at, stage_in_, length);
    });
  }

  void all_to_all(std::span<const std::byte> input, std::span<std::byte> output) override {
    const std::size_t n = input.size() / world_;
    if (n == 0) return;
    in_pieces(n, kStageBytes / world_, [&](std::size_t at, std::size_t length) {
      for (std::size_t r = 0; r < world_; ++r) {
        copy(stage_in_ + r * length, input.data() + r * n + at, length);
      }
      settle(nccl_->ncclGroupStart_(), "ncclGroupStart");
      for (std::size_t r = 0; r < world_; ++r) {
        const int peer = static_cast<int>(r);
        begun(nccl_->ncclSend_(stage_in_ + r * length, length, ncclUint8, peer, group_, stream_),
              "ncclSend");
        begun(nccl_->ncclRecv_(stage_out_ + r * length, length, ncclUint8, peer, group_, stream_),
              "ncclRecv");
      }
      call(nccl_->ncclGroupEnd_(), "ncclGroupEnd");
      for (std::size_t r = 0; r < world_; ++r) {
        copy(output.data() + r * n + at, stage_out_ + r * length, length);
      }
    });
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const auto send = [&](void* at, std::size_t length) {
      call(nccl_->ncclBroadcast_(at, at, length, ncclUint8, root, group_, stream_),
           "ncclBroadcast");
    };
    if (bytes.empty()) return;
    // Each rank by its own memory: how it is cut must be the same on all.
    in_pieces(bytes.size(), kStageBytes, [&](std::size_t at, std::size_t length) {
      if (place_ == root) copy(stage_in_, bytes.data() + at, length);
      send(stage_in_, length);
      if (place_ != root) copy(bytes.data() + at, stage_in_, length);
    });
  }

  void abort() noexcept override { aborted_ = true; }

 private:
  template <class Piece>
  static void in_pieces(std::size_t n, std::size_t most, const Piece& piece) {
    const std::size_t step = most / 16 * 16;  // whole elements, aligned
    for (std::size_t at = 0; at < n; at += step) piece(at, std::min(step, n - at));
  }

  /// Either way between host and device; blocks no longer than the copy takes.
  void copy(std::byte* to, const std::byte* from, std::size_t length) {
    check_cuda(cudaMemcpyAsync(to, from, length, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  /// Between ncclGroupStart and ncclGroupEnd.
  void begun(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    refuse(result, what);
  }
  /// Until NCCL has taken the call in.
  void settle(ncclResult_t result, const char* what) {
    const Nanoseconds begin = monotonic_now();
    while (result == ncclInProgress) {
      pause(begin, what);
      if (nccl_->ncclCommGetAsyncError_(group_, &result) != ncclSuccess) refuse(result, what);
    }
    if (result != ncclSuccess) refuse(result, what);
  }
  /// Until the bytes are there.
  void call(ncclResult_t result, const char* what) {
    settle(result, what);
    const Nanoseconds begin = monotonic_now();
    for (;;) {
      const cudaError_t state = cudaStreamQuery(stream_);
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) check_cuda(state, what);
      ncclResult_t health = ncclSuccess;
      if (nccl_->ncclCommGetAsyncError_(group_, &health) != ncclSuccess ||
          (health != ncclSuccess && health != ncclInProgress)) {
        refuse(health, what);
      }
      pause(begin, what);
    }
  }
  void pause(Nanoseconds since, const char* what) {
    const bool late = monotonic_now() - since > timeout_;
    if (!aborted_ && !late) return std::this_thread::sleep_for(kAskAgain);
    if (group_ != nullptr) nccl_->ncclCommAbort_(std::exchange(group_, nullptr));
    throw Error(late ? ErrorCode::kDeadlineExceeded : ErrorCode::kUnavailable,
                late ? fmt::format("{} stood still for the {:.1f} s that ranks are given", what,
                                   std::chrono::duration<double>(timeout_).count())
                     : fmt::format("{} was given up, since a rank failed", what));
  }
  [[noreturn]] void refuse(ncclResult_t result, const char* what) const {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("{}: {}; NCCL_DEBUG=WARN says more", what, nccl_->ncclGetErrorString_(result)),
        static_cast<int>(result));
  }

  std::shared_ptr<const Functions> nccl_;
  int gpu_;
  Nanoseconds timeout_;
  int place_ = 0;
  std::size_t world_ = 1;
  ncclComm_t group_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::byte* stage_in_ = nullptr;
  std::byte* stage_out_ = nullptr;
  std::atomic<bool> aborted_{false};
};

class Gpu final : public NcclDevice {
 public:
  Gpu(std::shared_ptr<const Functions> nccl, int index, Nanoseconds timeout)
      : nccl_(std::move(nccl)), index_(index), timeout_(timeout) {}

  NcclGroup::Id new_id() override {
    ncclUniqueId unique{};
    if (const ncclResult_t result = nccl_->ncclGetUniqueId_(&unique)) {
      throw Error(ErrorCode::kUnavailable,
                  fmt::format("ncclGetUniqueId: {}", nccl_->ncclGetErrorString_(result)),
                  static_cast<int>(result));
    }
    NcclGroup::Id id;
    std::memcpy(id.data(), &unique, id.size());
    return id;
  }
  std::unique_ptr<NcclGroup> new_group() override {
    return std::make_unique<GpuGroup>(nccl_, index_, timeout_);
  }
  std::string description() const override {
    return fmt::format("NCCL {} on cuda{}", version_of(*nccl_), index_);
  }

 private:
  std::shared_ptr<const Functions> nccl_;
  int index_;
  Nanoseconds timeout_;
};

}  // namespace

NcclInventory nccl_inventory() {
  try {
    const auto nccl = open_library();
    return {fmt::format("{}, {}", version_of(*nccl), nccl->library.path()), {}};
  } catch (const Error& error) {
    return {{}, error.what()};
  }
}

std::shared_ptr<NcclDevice> open_nccl(Nanoseconds timeout) {
  auto nccl = open_library();
  int gpus = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&gpus); error != cudaSuccess || gpus == 0) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("NCCL {} is installed ({}), but there is no GPU: {}; install an NVIDIA "
                            "driver and a GPU for each rank, or use `collectives=auto`",
                            version_of(*nccl), nccl->library.path(),
                            error == cudaSuccess ? "none is visible" : cudaGetErrorString(error)),
                static_cast<int>(error));
  }
  const LocalRank local = local_rank();
  if (local.count > static_cast<std::size_t>(gpus)) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("{} ranks are on this host ({}), and {} GPUs: NCCL needs a GPU for each "
                    "rank; start fewer ranks, or use `collectives=auto`",
                    local.count, local.source, gpus));
  }
  return std::make_shared<Gpu>(std::move(nccl), static_cast<int>(local.rank), timeout);
}

}  // namespace ziggurat
