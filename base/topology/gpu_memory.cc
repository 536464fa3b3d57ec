// SPDX-License-Identifier: Apache-2.0
// base/topology/gpu_memory.cc: calls four functions of libnvidia-ml. Their types are declared here,
// because not every toolkit has the library's header; its binary interface has not changed since
// 2012.
#include "base/topology/gpu_memory.h"

#include <dlfcn.h>

namespace ziggurat {
namespace {

using Result = int;  // nvmlReturn_t: 0 is success
struct Memory {      // nvmlMemory_t: bytes
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

struct GpuMemoryReader::Library {
  void* handle = nullptr;
  bool started = false;
  Result (*init)() = nullptr;
  Result (*shutdown)() = nullptr;
  Result (*device_by_address)(const char* address, void** device) = nullptr;
  Result (*memory_info)(void* device, Memory* memory) = nullptr;

  ~Library() {
    if (started) static_cast<void>(shutdown());
    if (handle != nullptr) ::dlclose(handle);
  }
};

GpuMemoryReader::GpuMemoryReader(const std::string& library) : library_(new Library) {
  Library& its = *library_;
  its.handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  its.started = its.handle != nullptr && find(its.handle, "nvmlInit_v2", its.init) &&
                find(its.handle, "nvmlShutdown", its.shutdown) &&
                find(its.handle, "nvmlDeviceGetHandleByPciBusId_v2", its.device_by_address) &&
                find(its.handle, "nvmlDeviceGetMemoryInfo", its.memory_info) && its.init() == 0;
}

GpuMemoryReader::~GpuMemoryReader() = default;

std::optional<std::uint64_t> GpuMemoryReader::free_bytes(const std::string& pci_address) const {
  void* device = nullptr;
  Memory memory{};
  if (!library_->started || library_->device_by_address(pci_address.c_str(), &device) != 0 ||
      library_->memory_info(device, &memory) != 0) {
    return std::nullopt;
  }
  return memory.free;
}

}  // namespace ziggurat
