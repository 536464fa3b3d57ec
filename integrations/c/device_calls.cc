// SPDX-License-Identifier: Apache-2.0
// integrations/c/device_calls.cc: the C functions of devices.
#include <fmt/format.h>

#include "integrations/c/c_call.h"
#include "integrations/c/embedded_device.h"
#include "integrations/c/engine_calls.h"

namespace {

using ziggurat::copied;
using ziggurat::devices;
using ziggurat::EmbeddedDevice;
using ziggurat::guarded;
using ziggurat::required;
using ziggurat::wrong;

EmbeddedDevice::Memory device_memory_of(const ziggurat_device_memory& given) {
  EmbeddedDevice::Memory memory{.address = given.address, .size_bytes = given.size_bytes};
  switch (given.kind) {
    case ZIGGURAT_HOST_MEMORY:
      if (given.index == 0) return memory;
      throw wrong(fmt::format("memory.index is {}, but host memory has none: give 0", given.index));
    case ZIGGURAT_CUDA_MEMORY: memory.gpu = given.index; return memory;
    default: break;
  }
  throw wrong(fmt::format("memory.kind is {}: give ZIGGURAT_HOST_MEMORY or ZIGGURAT_CUDA_MEMORY",
                          given.kind));
}

}  // namespace

ziggurat_status ziggurat_device_open(ziggurat_runtime runtime, const ziggurat_device_memory* memory,
                                     ziggurat_device* device) {
  return guarded([&] {
    *required(device, "device") = 0;
    const EmbeddedDevice::Memory its = device_memory_of(copied(memory, "memory"));
    *device = devices().add(
        std::make_shared<ziggurat::OpenDevice>(ziggurat::runtimes().find(runtime), its));
  });
}

ziggurat_status ziggurat_device_close(ziggurat_device device) {
  return guarded([&] {
    if (!devices().remove_if_unused(device))
      throw wrong(fmt::format("device {} is in use: close its engine first", device));
  });
}
