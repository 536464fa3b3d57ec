// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/api_pool.cc: memory in the order of streams, and the pools that it comes from.
#include <algorithm>

#include "tests/cuda_double/api.h"

namespace ziggurat::cuda_double {
namespace {

constexpr std::uint64_t kNs = 500;

Pool* pool_of(Machine& its, cudaMemPool_t handle) {
  auto* const pool = reinterpret_cast<Pool*>(handle);
  for (const auto& device : its.devices) {
    if (&device->default_pool == pool) return pool;
  }
  for (Pool& one : its.pools) {
    if (&one == pool && !one.destroyed) return pool;
  }
  its.find("a call names a memory pool that does not exist");
  return nullptr;
}

cudaMemPool_t handle_of(Pool* pool) { return reinterpret_cast<cudaMemPool_t>(pool); }

bool grow(DeviceState& device, Pool& pool, std::uint64_t size_bytes) {
  const std::uint64_t used = pool.used + size_bytes;
  if (used > pool.reserved) {
    const std::uint64_t more = used - pool.reserved;
    const std::uint64_t free =
        device.capacity_bytes - device.allocated_bytes - device.reserved_bytes;
    if (more > free || (pool.max_bytes != 0 && used > pool.max_bytes)) return false;
    device.reserved_bytes += more;
    pool.reserved = used;
    pool.reserved_high = std::max(pool.reserved_high, used);
  }
  pool.used = used;
  pool.used_high = std::max(pool.used_high, used);
  return true;
}

/// The allocation counts as a write on its stream: an access elsewhere needs an order after it
/// (:7813-7816, "stream query, stream synchronize, and CUDA events can be used").
cudaError_t allocate(Machine& its, void** address, std::size_t size_bytes, Pool* pool,
                     cudaStream_t handle, const char* name) {
  *address = nullptr;
  CUstream_st* stream = stream_of(its, handle, name);
  if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
  if (pool == nullptr) pool = &its.devices[static_cast<std::size_t>(stream->device)]->default_pool;
  if (size_bytes == 0) return cudaErrorInvalidValue;
  DeviceState& device = *its.devices[static_cast<std::size_t>(pool->device)];
  if (!grow(device, *pool, size_bytes)) return cudaErrorMemoryAllocation;
  Allocation* allocation = device.memory.allocate(size_bytes);
  if (allocation == nullptr) {
    pool->used -= size_bytes;
    return cudaErrorMemoryAllocation;
  }
  allocation->pool = pool;
  its.history.forget(allocation->range);
  *address = reinterpret_cast<void*>(allocation->range.begin);
  its.submit(stream, {.what = fmt::format("{} of {} bytes", name, size_bytes),
                      .duration_ns = kNs,
                      .accesses = {{allocation->range, true}}});
  return cudaSuccess;
}

std::uint64_t* counter_of(Pool& pool, cudaMemPoolAttr attribute) {
  switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold: return &pool.threshold;
    case cudaMemPoolAttrReservedMemCurrent: return &pool.reserved;
    case cudaMemPoolAttrReservedMemHigh: return &pool.reserved_high;
    case cudaMemPoolAttrUsedMemCurrent: return &pool.used;
    case cudaMemPoolAttrUsedMemHigh: return &pool.used_high;
    default: return nullptr;
  }
}

int* switch_of(Pool& pool, cudaMemPoolAttr attribute) {
  const int index = static_cast<int>(attribute) - 1;
  return index >= 0 && index < 3 ? &pool.reuse[index] : nullptr;
}

}  // namespace
}  // namespace ziggurat::cuda_double

using namespace ziggurat::cuda_double;

cudaError_t cudaMallocAsync(void** address, std::size_t size_bytes, cudaStream_t stream) {
  return call("cudaMallocAsync", [&](Machine& its, auto&) {
    return allocate(its, address, size_bytes, nullptr, stream, "cudaMallocAsync");
  });
}

cudaError_t cudaMallocFromPoolAsync(void** address, std::size_t size_bytes, cudaMemPool_t handle,
                                    cudaStream_t stream) {
  return call("cudaMallocFromPoolAsync", [&](Machine& its, auto&) {
    Pool* pool = pool_of(its, handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    return allocate(its, address, size_bytes, pool, stream, "cudaMallocFromPoolAsync");
  });
}

// "The allocation must not be accessed after stream execution reaches the free" (:7846): the free
// counts as a write, so that an access that nothing orders before it is a race.
cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  return call("cudaFreeAsync", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, handle, "cudaFreeAsync");
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    DeviceState* device = its.device_of(begin);
    Allocation* allocation = device == nullptr ? nullptr : device->memory.find(begin);
    if (allocation == nullptr || allocation->range.begin != begin || allocation->of_module ||
        !allocation->freed_by.empty()) {
      return refuse(its, cudaErrorInvalidValue,
                    "cudaFreeAsync: {} is not the start of an allocation", address);
    }
    allocation->freed_by = fmt::format("cudaFreeAsync on stream {}", stream->actor);
    its.submit(stream, {.what = "cudaFreeAsync",
                        .duration_ns = kNs,
                        .accesses = {{allocation->range, true}},
                        .body = [device, allocation](auto&) {
                          const std::uint64_t size = allocation->range.size_bytes();
                          if (allocation->pool != nullptr) {
                            allocation->pool->used -= size;
                          } else {
                            device->allocated_bytes -= size;
                          }
                          device->memory.release(*allocation);
                          return cudaSuccess;
                        }});
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* handle, const cudaMemPoolProps* properties) {
  return call("cudaMemPoolCreate", [&](Machine& its, auto&) {
    const int device = properties->location.id;
    if (properties->allocType != cudaMemAllocationTypePinned ||
        properties->location.type != cudaMemLocationTypeDevice || device < 0 ||
        device >= static_cast<int>(its.devices.size())) {
      return cudaErrorInvalidValue;
    }
    its.pools.emplace_back();
    its.pools.back().device = device;
    its.pools.back().max_bytes = properties->maxSize;
    *handle = handle_of(&its.pools.back());
    return cudaSuccess;
  });
}

// "If any pointers obtained from this pool haven't been freed or the pool has free operations that
// haven't completed when cudaMemPoolDestroy is invoked, the function will return immediately": then
// nobody can say when the memory is back, so it is a finding.
cudaError_t cudaMemPoolDestroy(cudaMemPool_t handle) {
  return call("cudaMemPoolDestroy", [&](Machine& its, auto&) {
    Pool* pool = pool_of(its, handle);
    if (pool == nullptr || pool->is_default) return cudaErrorInvalidValue;
    if (pool->used != 0) {
      its.find(fmt::format("cudaMemPoolDestroy: {} bytes of it are in use", pool->used));
    }
    DeviceState& device = *its.devices[static_cast<std::size_t>(pool->device)];
    device.reserved_bytes -= pool->reserved;
    pool->reserved = 0;
    pool->destroyed = true;
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, std::size_t keep) {
  return call("cudaMemPoolTrimTo", [&](Machine& its, auto&) {
    Pool* pool = pool_of(its, handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    const std::uint64_t left = std::max<std::uint64_t>(pool->used, keep);
    if (pool->reserved > left) {
      its.devices[static_cast<std::size_t>(pool->device)]->reserved_bytes -= pool->reserved - left;
      pool->reserved = left;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  return call("cudaMemPoolSetAttribute", [&](Machine& its, auto&) {
    Pool* pool = pool_of(its, handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (int* one = switch_of(*pool, attribute)) {
      *one = *static_cast<const int*>(value);
      return cudaSuccess;
    }
    const auto given = *static_cast<const std::uint64_t*>(value);
    switch (attribute) {
      case cudaMemPoolAttrReleaseThreshold: pool->threshold = given; return cudaSuccess;
      case cudaMemPoolAttrReservedMemHigh:
      case cudaMemPoolAttrUsedMemHigh:
        // "High watermark can only be reset to zero" (driver_types.h:2111, :2124).
        if (given != 0) return cudaErrorInvalidValue;
        *counter_of(*pool, attribute) =
            attribute == cudaMemPoolAttrUsedMemHigh ? pool->used : pool->reserved;
        return cudaSuccess;
      default: return cudaErrorInvalidValue;
    }
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
  return call("cudaMemPoolGetAttribute", [&](Machine& its, auto&) {
    Pool* pool = pool_of(its, handle);
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (const int* one = switch_of(*pool, attribute)) {
      *static_cast<int*>(value) = *one;
      return cudaSuccess;
    }
    const std::uint64_t* counter = counter_of(*pool, attribute);
    if (counter == nullptr) return cudaErrorInvalidValue;
    *static_cast<std::uint64_t*>(value) = *counter;
    return cudaSuccess;
  });
}
