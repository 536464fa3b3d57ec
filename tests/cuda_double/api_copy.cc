// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/api_copy.cc: copies and fills.
//
// A destination on the host is poisoned when the copy is queued, since its bytes mean nothing until
// the copy is over; a pinned source is compared between queue and execution, since nobody knows
// when the device reads it.
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>

#include "tests/cuda_double/api.h"

namespace ziggurat::cuda_double {
namespace {

constexpr std::uint64_t kCopyNs = 3000;

struct Side {
  Range range;
  DeviceState* device = nullptr;  // null: the host's
  HostMemory::Kind host = HostMemory::Kind::kPageable;

  std::byte* bytes() const {
    return device != nullptr ? device->memory.bytes(range.begin)
                             : reinterpret_cast<std::byte*>(range.begin);
  }
  bool pinned() const { return device == nullptr && host == HostMemory::Kind::kPinned; }
  bool pageable() const { return device == nullptr && host != HostMemory::Kind::kPinned; }
};

struct Transfer {
  Side to;
  Side from;
  std::size_t size_bytes = 0;
};

std::size_t hash_of(const std::byte* bytes, std::size_t size_bytes) {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(bytes), size_bytes});
}

/// An error with a finding, if device memory is not one live allocation's, or host memory is
/// page-locked in part ("straddles").
cudaError_t look_at(Machine& its, const char* name, Side& side) {
  side.device = its.device_of(side.range.begin);
  if (side.device == nullptr) {
    side.host = its.host.kind_of(side.range);
    if (side.host != HostMemory::Kind::kMixed) return cudaSuccess;
    return refuse(its, cudaErrorInvalidValue,
                  "{}: {} bytes at {:#x} straddle the end of page-locked memory", name,
                  side.range.size_bytes(), side.range.begin);
  }
  const Allocation* allocation = side.device->memory.find(side.range.begin);
  if (allocation == nullptr || !allocation->range.contains(side.range)) {
    return refuse(its, cudaErrorInvalidValue, "{}: {} bytes at {:#x} are not one allocation's: {}",
                  name, side.range.size_bytes(), side.range.begin,
                  side.device->memory.nearest(side.range.begin));
  }
  if (allocation->freed_by.empty()) return cudaSuccess;
  return refuse(its, cudaErrorInvalidValue, "{}: {:#x} was given to {}", name, side.range.begin,
                allocation->freed_by);
}

bool fits(const Transfer& transfer, cudaMemcpyKind kind) {
  const bool to_device = transfer.to.device != nullptr;
  const bool from_device = transfer.from.device != nullptr;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    case cudaMemcpyDefault: return true;
  }
  return false;
}

/// The pageable source goes to staging memory at once, or after all before it on the stream: "the
/// driver may synchronize with the stream and stage the copy" (cuda_runtime_api.h:102-103).
cudaError_t stage(Machine& its, Machine::Lock& lock, CUstream_st* stream, Operation& operation,
                  const Transfer& transfer) {
  if (mix(its.seed, stream->submitted + 31) % 2 == 0) {
    const cudaError_t error = its.wait_for(lock, Machine::last_of(stream));
    if (error != cudaSuccess) return error;
  }
  its.host_access(transfer.from.range, false, operation.what);
  const std::byte* source = transfer.from.bytes();
  const std::vector<std::byte> staged(source, source + transfer.size_bytes);
  operation.accesses = {{transfer.to.range, true}};
  operation.body = [staged, transfer](auto&) {
    std::memcpy(transfer.to.bytes(), staged.data(), staged.size());
    return cudaSuccess;
  };
  return cudaSuccess;
}

/// What runs when the stream comes to it.
std::function<cudaError_t(std::vector<Access>&)> body_of(Machine& its, const Transfer& transfer,
                                                         const std::string& what) {
  const bool watch = transfer.from.pinned() && its.under_way(transfer.from.range, true) == nullptr;
  const std::size_t before = watch ? hash_of(transfer.from.bytes(), transfer.size_bytes) : 0;
  std::uint64_t poison = 0;
  if (transfer.to.pinned() && its.under_way(transfer.to.range) == nullptr) {
    poison = mix(its.seed, transfer.to.range.begin) | 1;
    fill_with_poison(transfer.to.bytes(), transfer.size_bytes, poison);
  }
  const std::size_t poisoned = poison == 0 ? 0 : hash_of(transfer.to.bytes(), transfer.size_bytes);
  return [&its, transfer, watch, before, poison, poisoned, what](auto&) {
    if (watch && hash_of(transfer.from.bytes(), transfer.size_bytes) != before) {
      its.find(what + ": its source changed after it was queued");
    }
    if (poison != 0 && hash_of(transfer.to.bytes(), transfer.size_bytes) != poisoned) {
      its.find(what + ": the host wrote into its destination while it was queued");
    }
    std::memmove(transfer.to.bytes(), transfer.from.bytes(), transfer.size_bytes);
    return cudaSuccess;
  };
}

const char* direction_of(const Transfer& transfer) {
  if (transfer.to.device == nullptr) return "to the host";
  return transfer.from.device == nullptr ? "to the device" : "on the device";
}

cudaError_t start(Machine& its, Machine::Lock& lock, CUstream_st* stream, const char* name,
                  const Transfer& transfer) {
  Operation operation;
  operation.what =
      fmt::format("{} of {} bytes {}", name, transfer.size_bytes, direction_of(transfer));
  operation.duration_ns = kCopyNs + transfer.size_bytes / 16;  // 16 GB/s
  const bool waits = transfer.to.pageable();
  if (transfer.from.pageable() && transfer.to.device != nullptr) {
    const cudaError_t error = stage(its, lock, stream, operation, transfer);
    if (error != cudaSuccess) return error;
  } else {
    operation.accesses = {{transfer.from.range, false}, {transfer.to.range, true}};
    operation.body = body_of(its, transfer, operation.what);
  }
  its.submit(stream, std::move(operation));
  // "For transfers from any host memory to any host memory, the function is fully synchronous"
  // (:99-100); to pageable memory it "might be synchronous" (:96).
  return waits ? its.wait_for(lock, Machine::last_of(stream)) : cudaSuccess;
}

cudaError_t copy(Machine& its, Machine::Lock& lock, void* to, const void* from,
                 std::size_t size_bytes, cudaMemcpyKind kind, cudaStream_t handle,
                 const char* name) {
  CUstream_st* stream = stream_of(its, handle, name);
  if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
  if (size_bytes == 0) return cudaSuccess;
  Transfer transfer{{range_of(to, size_bytes)}, {range_of(from, size_bytes)}, size_bytes};
  for (Side* side : {&transfer.to, &transfer.from}) {
    if (const cudaError_t error = look_at(its, name, *side); error != cudaSuccess) return error;
  }
  if (!fits(transfer, kind)) {
    // "Calling cudaMemcpyAsync with dst and src pointers that do not match the direction of the
    // copy results in an undefined behavior."
    return refuse(its, cudaErrorInvalidMemcpyDirection, "{}: the direction {} is not the pointers'",
                  name, static_cast<int>(kind));
  }
  if (transfer.to.range.overlaps(transfer.from.range)) {
    return refuse(its, cudaErrorInvalidValue, "{}: source and destination overlap", name);
  }
  return start(its, lock, stream, name, transfer);
}

cudaError_t fill(Machine& its, void* to, int value, std::size_t size_bytes, cudaStream_t handle,
                 const char* name) {
  CUstream_st* stream = stream_of(its, handle, name);
  if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
  if (size_bytes == 0) return cudaSuccess;
  Side side{range_of(to, size_bytes)};
  if (const cudaError_t error = look_at(its, name, side); error != cudaSuccess) return error;
  if (side.pageable()) {
    return refuse(its, cudaErrorInvalidValue, "{}: {} is pageable memory of the host", name, to);
  }
  its.submit(stream, {.what = fmt::format("{} of {} bytes", name, size_bytes),
                      .duration_ns = 2000 + size_bytes / 500,
                      .accesses = {{side.range, true}},
                      .body = [side, value, size_bytes](auto&) {
                        std::memset(side.bytes(), value, size_bytes);
                        return cudaSuccess;
                      }});
  return cudaSuccess;
}

}  // namespace
}  // namespace ziggurat::cuda_double

using namespace ziggurat::cuda_double;

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call("cudaMemcpyAsync", [&](Machine& its, Machine::Lock& lock) {
    if (its.options.mischief == Mischief::kStaleSource && kind == cudaMemcpyHostToDevice)
      from = std::exchange(its.newest_sources.try_emplace(size_bytes, from).first->second, from);
    return copy(its, lock, to, from, size_bytes, kind, stream, "cudaMemcpyAsync");
  });
}

// On the null stream; "synchronous" (:72-92), except that a copy on the device may return early.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size_bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", [&](Machine& its, Machine::Lock& lock) {
    cudaError_t error = copy(its, lock, to, from, size_bytes, kind, nullptr, "cudaMemcpy");
    const bool on_device = its.device_of(range_of(to, 1).begin) != nullptr &&
                           its.device_of(range_of(from, 1).begin) != nullptr;
    if (error == cudaSuccess && !on_device) {
      error = its.wait_for(lock, Machine::last_of(current(its).null_stream));
    }
    return error;
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t size_bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", [&](Machine& its, auto&) {
    return fill(its, to, value, size_bytes, stream, "cudaMemsetAsync");
  });
}

// "The cudaMemset functions are asynchronous with respect to the host" (:109-110).
cudaError_t cudaMemset(void* to, int value, std::size_t size_bytes) {
  return call("cudaMemset", [&](Machine& its, auto&) {
    return fill(its, to, value, size_bytes, nullptr, "cudaMemset");
  });
}
