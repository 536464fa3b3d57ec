// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/api_memory.cc: memory of devices, in the order of the host, and pinned memory.
#include <sys/mman.h>

#include "tests/cuda_double/api.h"

namespace ziggurat::cuda_double {
namespace {

/// What is taken back while work uses it is a finding, and so is what no order keeps apart from it.
void give_back(Machine& its, Range range, const char* name) {
  if (const Operation* user = its.under_way(range)) {
    its.find(fmt::format("{}: {} on stream {} is under way there", name, user->what,
                         user->stream->actor));
  } else {
    its.host_access(range, true, name);
  }
  its.history.forget(range);
}

cudaError_t host_alloc(void** memory, std::size_t size_bytes, const char* name) {
  return call(name, [&](Machine& its, auto&) {
    *memory = nullptr;
    if (size_bytes == 0) return cudaErrorInvalidValue;
    if (size_bytes > its.options.pinned_bytes_max - its.host.size_bytes()) {
      return cudaErrorMemoryAllocation;
    }
    void* mapped = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
    fill_with_poison(static_cast<std::byte*>(mapped), size_bytes, mix(its.seed, 77));
    its.host.add(range_of(mapped, size_bytes), HostMemory::How::kAllocated);
    *memory = mapped;
    return cudaSuccess;
  });
}

}  // namespace
}  // namespace ziggurat::cuda_double

using namespace ziggurat::cuda_double;

cudaError_t cudaMalloc(void** address, std::size_t size_bytes) {
  return call("cudaMalloc", [&](Machine& its, auto&) {
    *address = nullptr;
    if (size_bytes == 0) return cudaSuccess;
    DeviceState& device = current(its);
    const std::uint64_t used = device.allocated_bytes + device.reserved_bytes;
    if (size_bytes > device.capacity_bytes - used) return cudaErrorMemoryAllocation;
    Allocation* allocation = device.memory.allocate(size_bytes);
    if (allocation == nullptr) return cudaErrorMemoryAllocation;
    device.allocated_bytes += size_bytes;
    its.history.forget(allocation->range);
    *address = reinterpret_cast<void*>(allocation->range.begin);
    return cudaSuccess;
  });
}

// "Callers must ensure that all accesses to these pointer have completed" (:4723-4725); for memory
// of cudaMalloc it "may perform implicit synchronization" (:4728), on which nobody may count.
cudaError_t cudaFree(void* address) {
  return call("cudaFree", [&](Machine& its, auto&) {
    if (address == nullptr) return cudaSuccess;
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    DeviceState* device = its.device_of(begin);
    Allocation* allocation = device == nullptr ? nullptr : device->memory.find(begin);
    if (allocation == nullptr || allocation->range.begin != begin || allocation->of_module ||
        !allocation->freed_by.empty()) {
      return refuse(its, cudaErrorInvalidValue, "cudaFree: {} is not the start of an allocation",
                    address);
    }
    give_back(its, allocation->range, "cudaFree");
    if (allocation->pool != nullptr) {
      allocation->pool->used -= allocation->range.size_bytes();
    } else {
      device->allocated_bytes -= allocation->range.size_bytes();
    }
    device->memory.release(*allocation);
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t size_bytes, unsigned) {
  return host_alloc(memory, size_bytes, "cudaHostAlloc");
}

cudaError_t cudaMallocHost(void** memory, std::size_t size_bytes) {
  return host_alloc(memory, size_bytes, "cudaMallocHost");
}

cudaError_t cudaFreeHost(void* memory) {
  return call("cudaFreeHost", [&](Machine& its, auto&) {
    if (memory == nullptr) return cudaSuccess;
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const Range range = its.host.find(begin, HostMemory::How::kAllocated);
    if (range.size_bytes() == 0) {
      return refuse(its, cudaErrorInvalidValue, "cudaFreeHost: {} is not of cudaHostAlloc", memory);
    }
    give_back(its, range, "cudaFreeHost");
    its.host.remove(begin);
    munmap(memory, range.size_bytes());
    return cudaSuccess;
  });
}

cudaError_t cudaHostRegister(void* memory, std::size_t size_bytes, unsigned flags) {
  return call("cudaHostRegister", [&](Machine& its, auto&) {
    constexpr unsigned kKnown =
        cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly;
    if (memory == nullptr || size_bytes == 0 || (flags & ~kKnown) != 0) {
      return cudaErrorInvalidValue;
    }
    const Range range = range_of(memory, size_bytes);
    if (its.device_of(range.begin) != nullptr) {
      return refuse(its, cudaErrorInvalidValue, "cudaHostRegister: {} is a device's", memory);
    }
    if (its.host.overlaps(range)) return cudaErrorHostMemoryAlreadyRegistered;
    if (size_bytes > its.options.pinned_bytes_max - its.host.size_bytes()) {
      return cudaErrorMemoryAllocation;
    }
    its.host.add(range, HostMemory::How::kRegistered);
    return cudaSuccess;
  });
}

// "The base address must be the same one specified to cudaHostRegister" (:4994).
cudaError_t cudaHostUnregister(void* memory) {
  return call("cudaHostUnregister", [&](Machine& its, auto&) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const Range range = its.host.find(begin, HostMemory::How::kRegistered);
    if (range.size_bytes() == 0) {
      return refuse(its, cudaErrorHostMemoryNotRegistered,
                    "cudaHostUnregister: {} does not begin a registration", memory);
    }
    if (const Operation* user = its.under_way(range)) {
      its.find(fmt::format("cudaHostUnregister: {} on stream {} is under way there", user->what,
                           user->stream->actor));
    }
    its.host.remove(begin);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call("cudaPointerGetAttributes", [&](Machine& its, auto&) {
    *attributes = cudaPointerAttributes{};
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    void* const same = const_cast<void*>(pointer);
    if (DeviceState* device = its.device_of(address)) {
      const Allocation* allocation = device->memory.find(address);
      if (allocation == nullptr) return cudaErrorInvalidValue;
      if (!allocation->freed_by.empty()) {
        // ":7848 ... or querying its pointer attributes results in undefined behavior"
        return refuse(its, cudaErrorInvalidValue, "cudaPointerGetAttributes: {} was given to {}",
                      pointer, allocation->freed_by);
      }
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = device->default_pool.device;
      attributes->devicePointer = same;
      return cudaSuccess;
    }
    const bool pinned = its.host.overlaps({address, address + 1});
    attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->device = pinned ? current_device() : cudaInvalidDeviceId;
    attributes->hostPointer = pinned ? same : nullptr;
    attributes->devicePointer = pinned ? same : nullptr;
    return cudaSuccess;
  });
}
