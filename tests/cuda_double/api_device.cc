// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/api_device.cc: errors, and devices as they are found.
#include <cstdio>
#include <cstring>

#include "tests/cuda_double/api.h"

namespace ziggurat::cuda_double {
namespace {

thread_local int device_of_thread = 0;
/// An error of before a reset() is void, on every thread.
struct LastError {
  cudaError_t error = cudaSuccess;
  std::uint64_t resets = 0;
};
thread_local LastError last_error;

cudaError_t last(const Machine& its) noexcept {
  return last_error.resets == its.resets ? last_error.error : cudaSuccess;
}

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr ErrorText kTexts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "no or too old a driver"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error"},
    {cudaErrorInvalidPtx, "cudaErrorInvalidPtx", "a PTX compilation failed"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "illegal memory access"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the memory is already registered"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "the memory is not registered"},
    {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction", "illegal instruction"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when the stream is capturing"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText& text_of(cudaError_t error) noexcept {
  for (const ErrorText& text : kTexts) {
    if (text.error == error) return text;
  }
  static constexpr ErrorText kOther{cudaErrorUnknown, "unrecognized error code",
                                    "unrecognized error code"};
  return kOther;
}

}  // namespace

int& current_device() noexcept { return device_of_thread; }

DeviceState& current(Machine& its) {
  if (device_of_thread >= static_cast<int>(its.devices.size())) device_of_thread = 0;
  return *its.devices[static_cast<std::size_t>(device_of_thread)];
}

cudaError_t remember(const Machine& its, cudaError_t error) noexcept {
  if (error != cudaSuccess) last_error = {error, its.resets};
  return error;
}

cudaError_t last_error_of_thread(bool take) {
  const Machine::Lock lock(machine().mutex);
  const cudaError_t error = last(machine());
  if (take) last_error = {};
  return error;
}

namespace {

/// Calls that ask what there is. Every other makes the primary context of the current device, "the
/// first time a runtime function which is not part of the error / device / version management is
/// called" (programming guide, Initialization).
bool makes_a_context(std::string_view name) noexcept {
  for (const std::string_view asks :
       {"cudaGetDevice", "cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaDeviceGetAttribute",
        "cudaDeviceGetPCIBusId", "cudaSetDevice"}) {
    if (name == asks) return false;
  }
  return true;
}

}  // namespace

cudaError_t admit(Machine& its, const char* name) {
  // cuda_runtime_api.h:2249 and :4087: host functions must not call CUDA.
  if (in_host_function()) {
    return refuse(its, cudaErrorNotPermitted, "{} was called in a host function", name);
  }
  // A driver serves the runtimes of its major version, and older ones.
  const bool is_old = its.options.driver_version / 1000 < CUDART_VERSION / 1000;
  if (!its.installed || is_old) return cudaErrorInsufficientDriver;
  if (its.devices.empty()) return cudaErrorNoDevice;
  ++its.calls;
  DeviceState& device = current(its);
  if (makes_a_context(name)) device.has_context = true;
  if (device.sticky != cudaSuccess) {
    its.write_late(device);
    return device.sticky;
  }
  if (its.calls != its.fail_call_at) return cudaSuccess;
  its.struck = name;
  if (is_sticky(its.call_error)) its.fail_device(current_device(), its.call_error);
  return its.call_error;
}

bool is_sticky(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return true;
    default: return false;
  }
}

}  // namespace ziggurat::cuda_double

using namespace ziggurat::cuda_double;

// "Returns the last error that has been produced by any of the runtime calls in the same instance
// of the CUDA Runtime library in the host thread and resets it" (cuda_runtime_api.h, Error
// Handling). What is sticky comes again with the next call.
cudaError_t cudaGetLastError() { return last_error_of_thread(true); }
cudaError_t cudaPeekAtLastError() { return last_error_of_thread(false); }
const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

cudaError_t cudaDriverGetVersion(int* version) {
  const Machine& its = machine();
  *version = its.installed ? its.options.driver_version : 0;  // 0: "if no driver is installed"
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return call("cudaGetDeviceCount", [&](Machine& its, auto&) {
    *count = static_cast<int>(its.devices.size());
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", [&](Machine& its, auto&) {
    if (device < 0 || device >= static_cast<int>(its.devices.size())) return cudaErrorInvalidDevice;
    current_device() = device;
    // "This function will also immediately initialize the runtime state on the primary context"
    // (cuda_runtime_api.h, cudaSetDevice).
    its.devices[static_cast<std::size_t>(device)]->has_context = true;
    return its.devices[static_cast<std::size_t>(device)]->sticky;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&](Machine& its, auto&) {
    static_cast<void>(current(its));
    *device = current_device();
    return cudaSuccess;
  });
}

namespace {

cudaError_t valid(const Machine& its, int device) {
  const bool exists = device >= 0 && device < static_cast<int>(its.devices.size());
  return exists ? cudaSuccess : cudaErrorInvalidDevice;
}

}  // namespace

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", [&](Machine& its, auto&) {
    if (valid(its, device) != cudaSuccess) return cudaErrorInvalidDevice;
    *properties = cudaDeviceProp{};
    std::snprintf(properties->name, sizeof(properties->name), "CUDA double %d", device);
    properties->totalGlobalMem = its.devices[static_cast<std::size_t>(device)]->capacity_bytes;
    properties->major = 8;
    properties->minor = 0;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->multiProcessorCount = 4;
    properties->sharedMemPerBlock = 48 << 10;
    properties->asyncEngineCount = 2;
    properties->unifiedAddressing = 1;
    properties->memoryPoolsSupported = 1;
    properties->streamPrioritiesSupported = 1;
    properties->hostRegisterSupported = 1;
    properties->pciBusID = 0x3a + device;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call("cudaDeviceGetAttribute", [&](Machine& its, auto&) {
    if (valid(its, device) != cudaSuccess) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrMultiProcessorCount: *value = 4; break;
      case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
      case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
      case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
      case cudaDevAttrWarpSize: *value = 32; break;
      case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
      case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
      case cudaDevAttrAsyncEngineCount: *value = 2; break;
      case cudaDevAttrUnifiedAddressing:
      case cudaDevAttrMemoryPoolsSupported:
      case cudaDevAttrHostRegisterSupported:
      case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
      case cudaDevAttrIntegrated:
      case cudaDevAttrConcurrentManagedAccess:
      case cudaDevAttrPageableMemoryAccess:
      case cudaDevAttrPageableMemoryAccessUsesHostPageTables: *value = 0; break;
      default:
        return refuse(its, cudaErrorInvalidValue,
                      "cudaDeviceGetAttribute: the double does not know attribute {}",
                      static_cast<int>(attribute));
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return call("cudaDeviceGetPCIBusId", [&](Machine& its, auto&) {
    if (valid(its, device) != cudaSuccess) return cudaErrorInvalidDevice;
    if (size < 13) return cudaErrorInvalidValue;  // "large enough to store 13 characters"
    std::snprintf(text, static_cast<std::size_t>(size), "0000:%02X:00.0",
                  0x3a + its.options.first_gpu + device);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", [&](Machine&, auto&) {
    *least = 0;  // "Stream priorities follow a convention where lower numbers imply greater"
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cudaMemGetInfo", [&](Machine& its, auto&) {
    const DeviceState& device = current(its);
    *total = device.capacity_bytes;
    *free = device.capacity_bytes - device.allocated_bytes - device.reserved_bytes;
    return cudaSuccess;
  });
}
