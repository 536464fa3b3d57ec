// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_device.cc: makes calls as operations of NCCL on a stream of a GPU.
//
// NCCL needs device memory. If the bytes of all members lie there, they are used where they are.
// Otherwise the bytes of all members go through the stage, in pieces that are cut alike on all
// ranks.
#include "collectives/nccl/nccl_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "base/topology/core_budget.h"
#include "collectives/cuda/rank_sum.h"
#include "collectives/nccl/nccl_stream.h"

namespace ziggurat {
namespace {

constexpr std::size_t kAlignment = 16;  // alignment of pieces, so that they have whole elements

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return ncclFloat32;
    case DType::kBFloat16: return ncclBfloat16;
    case DType::kFloat16: return ncclFloat16;
  }
  return ncclFloat32;
}

/// Calls `piece` for `n` bytes, in pieces of at most `most`.
template <class Piece>
void in_pieces(std::size_t n, std::size_t most, const Piece& piece) {
  const std::size_t step = most / kAlignment * kAlignment;
  for (std::size_t at = 0; at < n; at += step) piece(at, std::min(step, n - at));
}

struct Slice {
  std::byte* at = nullptr;
  std::size_t length = 0;
};

class GpuDevice final : public NcclDevice {
 public:
  GpuDevice(const std::shared_ptr<const NcclLibrary>& nccl, int index, const NcclOptions& options)
      : nccl_(nccl), index_(index), reduce_(options.reduce), lane_(nccl, index, options.timeout) {
    std::array<char, 32> name{};
    check_cuda(cudaDeviceGetPCIBusId(name.data(), static_cast<int>(name.size()), index),
               "cudaDeviceGetPCIBusId");
    gpu_ = name.data();
  }

  std::string description() const override {
    return fmt::format("NCCL {} on cuda{}", nccl_->version(), index_);
  }
  int version() const override {
    int code = 0;
    nccl_->check(nccl_->ncclGetVersion_(&code), "ncclGetVersion");
    return code;
  }
  const std::string& gpu() const override { return gpu_; }
  bool holds(std::span<const std::byte> bytes) const override {
    if (bytes.empty()) return true;
    // Without this, a thread that has not chosen a device would make a context on device 0, which
    // is another rank's. The old device is not chosen again, because that would make the context
    // too.
    int current = -1;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    if (current != index_) check_cuda(cudaSetDevice(index_), "cudaSetDevice");
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, bytes.data()), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeDevice && attributes.device == index_;
  }
  void give_up() noexcept override { lane_.give_up(); }

  Id new_id() override {
    ncclUniqueId unique{};
    nccl_->check(nccl_->ncclGetUniqueId_(&unique), "ncclGetUniqueId");
    Id id;
    std::memcpy(id.data(), &unique, id.size());
    return id;
  }
  Group join(const Id& id, Place place) override {
    lane_.open();
    return lane_.join(id, place);
  }
  void make(Group number, const Call& call, bool direct) override {
    lane_.open();
    const NcclGroup& group = lane_.group(number);
    switch (call.spec.kind) {
      case CallKind::kAllGather: return all_gather(group, call, direct);
      case CallKind::kReduceScatter:
        return reduce_ == Reduce::kNccl ? reduce_scatter_by_nccl(group, call, direct)
                                        : reduce_scatter(group, call, direct);
      case CallKind::kAllReduce:
        return reduce_ == Reduce::kNccl ? all_reduce_by_nccl(group, call, direct)
                                        : all_reduce(group, call, direct);
      case CallKind::kAllToAll: return all_to_all(group, call, direct);
      case CallKind::kAllReduceValues:
      case CallKind::kBarrier:
      case CallKind::kSend:
      case CallKind::kRecv: break;
    }
    throw Error(ErrorCode::kUnimplemented, "NCCL has no " + describe(call.spec));
  }
  void finish() override { lane_.finish(); }
  void abort() noexcept override { lane_.abort(); }
  void release() noexcept override { lane_.release(); }

 private:
  void gather(const NcclGroup& group, const std::byte* from, std::byte* to, std::size_t length) {
    lane_.finish_call(
        group, nccl_->ncclAllGather_(from, to, length, ncclUint8, group.handle, lane_.stream()),
        "ncclAllGather");
  }
  /// Sends out(r) to rank r, and receives what rank r sends into in(r).
  template <class Out, class In>
  void exchange(const NcclGroup& group, const Out& out, const In& in) {
    lane_.grouped(group, "ncclGroupEnd of ncclSend and ncclRecv", [&] {
      for (std::size_t r = 0; r < group.world; ++r) {
        const int peer = static_cast<int>(r);
        const Slice sent = out(r);
        const Slice got = in(r);
        if (sent.length > 0) {
          nccl_->check(
              nccl_->ncclSend_(sent.at, sent.length, ncclUint8, peer, group.handle, lane_.stream()),
              "ncclSend");
        }
        if (got.length > 0) {
          nccl_->check(
              nccl_->ncclRecv_(got.at, got.length, ncclUint8, peer, group.handle, lane_.stream()),
              "ncclRecv");
        }
      }
    });
  }
  /// Copies row r, at `from` + r * stride, to the stage.
  void stage_rows(const NcclGroup& group, const std::byte* from, std::size_t stride,
                  std::size_t length) {
    for (std::size_t r = 0; r < group.world; ++r) {
      lane_.copy(lane_.stage_in() + r * length, from + r * stride, length);
    }
    lane_.copied();
  }
  void unstage_rows(const NcclGroup& group, std::byte* to, std::size_t stride, std::size_t length) {
    for (std::size_t r = 0; r < group.world; ++r) {
      lane_.copy(to + r * stride, lane_.stage_out() + r * length, length);
    }
    lane_.copied();
  }

  void all_gather(const NcclGroup& group, const Call& call, bool direct) {
    const std::size_t n = call.input.size();
    if (n == 0) return;
    if (direct) return gather(group, call.input.data(), call.output.data(), n);
    in_pieces(n, NcclStream::kStageBytes / group.world, [&](std::size_t at, std::size_t length) {
      lane_.copy(lane_.stage_in(), call.input.data() + at, length);
      gather(group, lane_.stage_in(), lane_.stage_out(), length);
      unstage_rows(group, call.output.data() + at, n, length);
    });
  }

  /// Receives each rank's contribution to this rank's slice, and adds them.
  void reduce_scatter(const NcclGroup& group, const Call& call, bool direct) {
    const std::size_t n = call.output.size();
    const DType dtype = dtype_of(call.spec.element);
    in_pieces(n, NcclStream::kStageBytes / group.world, [&](std::size_t at, std::size_t length) {
      if (!direct) stage_rows(group, call.input.data() + at, n, length);
      exchange(
          group,
          [&](std::size_t r) {
            return direct ? Slice{const_cast<std::byte*>(call.input.data()) + r * n + at, length}
                          : Slice{lane_.stage_in() + r * length, length};
          },
          [&](std::size_t r) {
            return Slice{lane_.stage_out() + r * length, length};
          });
      std::byte* const sum = direct ? call.output.data() + at : lane_.stage_in();
      cuda::sum_ranks(lane_.stream(), {lane_.stage_out(), length, group.world}, dtype,
                      length / size_bytes(dtype), sum);
      if (!direct) lane_.copy(call.output.data() + at, sum, length);
      lane_.copied();
    });
  }

  /// Sums pieces. A piece is cut into a slice per rank, of which the last may be short. Owners sum
  /// their slices, which are then gathered, so the bits are those of reduce_scatter.
  void all_reduce(const NcclGroup& group, const Call& call, bool direct) {
    const DType dtype = dtype_of(call.spec.element);
    const std::size_t slice_most = NcclStream::kStageBytes / group.world / kAlignment * kAlignment;
    const auto piece = [&](std::size_t at, std::size_t length) {
      const std::size_t even = (length + group.world - 1) / group.world;
      const std::size_t slice = (even + kAlignment - 1) / kAlignment * kAlignment;
      const auto length_of = [&](std::size_t r) {
        return std::min(slice, length - std::min(length, r * slice));
      };
      std::byte* const values = call.output.data() + at;
      if (!direct) {
        lane_.copy(lane_.stage_in(), values, length);
        lane_.copied();
      }
      exchange(
          group,
          [&](std::size_t r) {
            return Slice{(direct ? values : lane_.stage_in()) + r * slice, length_of(r)};
          },
          [&](std::size_t r) {
            return Slice{lane_.stage_out() + r * slice, length_of(group.rank)};
          });
      std::byte* const own = lane_.stage_in() + group.rank * slice;
      cuda::sum_ranks(lane_.stream(), {lane_.stage_out(), slice, group.world}, dtype,
                      length_of(group.rank) / size_bytes(dtype), own);
      gather(group, own, lane_.stage_in(), slice);
      lane_.copy(values, lane_.stage_in(), length);
      lane_.copied();
    };
    in_pieces(call.output.size(), slice_most * group.world, piece);
  }

  void reduce_scatter_by_nccl(const NcclGroup& group, const Call& call, bool direct) {
    const std::size_t n = call.output.size();
    const DType dtype = dtype_of(call.spec.element);
    const auto sum = [&](const std::byte* from, std::byte* to, std::size_t length) {
      lane_.finish_call(
          group,
          nccl_->ncclReduceScatter_(from, to, length / size_bytes(dtype), type_of(dtype), ncclSum,
                                    group.handle, lane_.stream()),
          "ncclReduceScatter");
    };
    if (direct && n > 0) return sum(call.input.data(), call.output.data(), n);
    in_pieces(n, NcclStream::kStageBytes / group.world, [&](std::size_t at, std::size_t length) {
      stage_rows(group, call.input.data() + at, n, length);
      sum(lane_.stage_in(), lane_.stage_out(), length);
      lane_.copy(call.output.data() + at, lane_.stage_out(), length);
      lane_.copied();
    });
  }

  void all_reduce_by_nccl(const NcclGroup& group, const Call& call, bool direct) {
    const DType dtype = dtype_of(call.spec.element);
    const auto sum = [&](std::byte* at, std::size_t length) {
      lane_.finish_call(group,
                        nccl_->ncclAllReduce_(at, at, length / size_bytes(dtype), type_of(dtype),
                                              ncclSum, group.handle, lane_.stream()),
                        "ncclAllReduce");
    };
    if (call.output.empty()) return;
    if (direct) return sum(call.output.data(), call.output.size());
    in_pieces(call.output.size(), NcclStream::kStageBytes, [&](std::size_t at, std::size_t length) {
      lane_.copy(lane_.stage_in(), call.output.data() + at, length);
      sum(lane_.stage_in(), length);
      lane_.copy(call.output.data() + at, lane_.stage_in(), length);
      lane_.copied();
    });
  }

  void all_to_all(const NcclGroup& group, const Call& call, bool direct) {
    const std::size_t n = call.input.size() / group.world;
    const std::size_t most = direct ? n + kAlignment : NcclStream::kStageBytes / group.world;
    in_pieces(n, most, [&](std::size_t at, std::size_t length) {
      if (!direct) stage_rows(group, call.input.data() + at, n, length);
      const std::size_t stride = direct ? n : length;
      std::byte* const from = direct ? const_cast<std::byte*>(call.input.data()) : lane_.stage_in();
      std::byte* const to = direct ? call.output.data() : lane_.stage_out();
      exchange(
          group,
          [&](std::size_t r) {
            return Slice{from + r * stride, length};
          },
          [&](std::size_t r) {
            return Slice{to + r * stride, length};
          });
      if (!direct) unstage_rows(group, call.output.data() + at, n, length);
    });
  }

  std::shared_ptr<const NcclLibrary> nccl_;
  int index_;
  Reduce reduce_;
  std::string gpu_;
  NcclStream lane_;
};

/// Returns this rank's GPU. Launchers that bind GPUs to tasks (srun with gpus-per-task=1) show each
/// rank only its own, as number 0. If two ranks have the same one, that is found out when they
/// meet.
int gpu_of(const LocalRank& local, int visible) {
  if (visible == 1) return 0;
  if (local.count > static_cast<std::size_t>(visible)) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("{} ranks are on this host ({}), but {} GPUs are visible, and NCCL needs a "
                    "GPU for each rank; start fewer ranks, show each rank its own GPU "
                    "(CUDA_VISIBLE_DEVICES), or use `collectives=auto`",
                    local.count, local.source, visible));
  }
  return static_cast<int>(local.rank);
}

}  // namespace

std::unique_ptr<NcclDevice> open_nccl(const NcclOptions& options) {
  const auto nccl = NcclLibrary::open();
  int gpus = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&gpus); error != cudaSuccess || gpus == 0) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("NCCL {} is installed ({}), but there is no GPU: {}; install an NVIDIA "
                            "driver and a GPU for each rank, or use `collectives=auto`",
                            nccl->version(), nccl->library.path(),
                            error == cudaSuccess ? "none is visible" : cudaGetErrorString(error)),
                static_cast<int>(error));
  }
  return std::make_unique<GpuDevice>(nccl, gpu_of(local_rank(), gpus), options);
}

}  // namespace ziggurat
