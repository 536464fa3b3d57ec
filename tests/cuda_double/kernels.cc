// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/kernels.cc: the launch ABI of nvcc's objects (crt/host_runtime.h), and
// functions of the runtime that name kernels.
#include "tests/cuda_double/kernels.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "base/error.h"
#include "tests/cuda_double/api.h"
#include "tests/cuda_double/ptx/decode.h"
#include "tests/cuda_double/ptx/fatbin.h"
#include "tests/cuda_double/ptx/parse.h"
#include "tests/cuda_double/ptx/run.h"
#include "tests/cuda_double/twins.h"

namespace ziggurat::cuda_double {
namespace {

constexpr std::uint64_t kKernelNs = 5000;
constexpr std::uint64_t kInstructionsMax = 20'000'000'000;

/// One .cu file. Its variables lie on each device that ran one of its kernels.
struct Module {
  const void* wrapper = nullptr;
  std::unique_ptr<ptx::Text> text;  // when first needed: registration is before main()
  std::uint64_t machine_resets = 0;
  std::map<int, std::map<std::string, std::uint64_t>> variables;  // by device
};

struct Stub {
  Module* module = nullptr;
  std::string name;
  std::map<int, std::shared_ptr<const ptx::Kernel>> kernels;  // by device
  Twin twin;
};

/// Like the machine, for ever: objects register before main() and leave after it.
struct Registry {
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const void*, Stub> stubs;
  std::uint64_t executed = 0;
};
Registry& registry() {
  static Registry* const one = new Registry;
  return *one;
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

void place_variables(Machine& its, Module& module, int device) {
  DeviceState& state = *its.devices[static_cast<std::size_t>(device)];
  auto& addresses = module.variables[device];
  for (const ptx::Variable& one : module.text->globals) {
    Allocation* allocation = state.memory.allocate(std::max<std::uint64_t>(one.size_bytes, 1));
    if (allocation == nullptr) throw Error(ErrorCode::kResourceExhausted, "a module's variables");
    allocation->of_module = true;
    std::byte* bytes = state.memory.bytes(allocation->range.begin);
    std::memset(bytes, 0, one.size_bytes);
    std::copy(one.initial.begin(), one.initial.end(), bytes);
    addresses[one.name] = allocation->range.begin;
  }
}

void load(Machine& its, Stub& stub, int device) {
  Module& module = *stub.module;
  if (!module.text) {
    module.text = std::make_unique<ptx::Text>(ptx::parse(ptx::ptx_of(module.wrapper).front()));
  }
  if (module.machine_resets != its.resets) {
    module.variables.clear();
    module.machine_resets = its.resets;
    for (auto& [address, other] : registry().stubs) {
      if (other.module == &module) other.kernels.clear();
    }
  }
  if (!module.variables.contains(device)) place_variables(its, module, device);
  if (stub.kernels.contains(device)) return;
  for (const ptx::Function& function : module.text->kernels) {
    if (function.name != stub.name) continue;
    stub.kernels[device] = std::make_shared<const ptx::Kernel>(
        ptx::decode(function, module.text->shared, module.variables[device]));
    return;
  }
  throw Error(ErrorCode::kInvalidArgument, fmt::format("the PTX has no kernel {}", stub.name));
}

/// The kernel on the device; null, with a finding that says why not.
std::shared_ptr<const ptx::Kernel> kernel_of(Machine& its, const void* address, int device) {
  const auto found = registry().stubs.find(address);
  if (found == registry().stubs.end()) {
    its.find("a launch of a function that no module registered");
    return nullptr;
  }
  try {
    load(its, found->second, device);
    return found->second.kernels[device];
  } catch (const Error& error) {
    its.find(error.what());
    return nullptr;
  }
}

cudaError_t run(Machine& its, const Stub& stub, const ptx::Kernel& kernel, DeviceState& device,
                const ptx::Launch& launch, std::vector<Access>& accesses) {
  ptx::GlobalMemory memory(its, device);
  cudaError_t error = cudaSuccess;
  const Twin* const twin = stub.twin ? &stub.twin : program_twin(stub.name);
  try {
    if (twin != nullptr && twin != &stub.twin && programs_are_compared()) {
      registry().executed += run_compared(its, device, *twin, kernel, launch, accesses);
    } else if (twin != nullptr) {
      (*twin)(TwinLaunch(kernel, launch, memory));
    } else {
      registry().executed += ptx::run(kernel, launch, memory);
    }
  } catch (const ptx::Fault& fault) {
    its.find(fault.what());
    error = fault.error;
  }
  memory.append_accesses(accesses);
  return error;
}

bool fits(const ptx::Kernel& kernel, const Configuration& asked) {
  const std::uint64_t threads = std::uint64_t{asked.block.x} * asked.block.y * asked.block.z;
  const bool some = asked.grid.x > 0 && asked.grid.y > 0 && asked.grid.z > 0;
  // CUDA C++ Programming Guide, technical specifications per compute capability.
  return some && threads > 0 && threads <= kernel.threads_max && asked.block.z <= 64 &&
         asked.grid.x <= 0x7fffffff && asked.grid.y <= 65535 && asked.grid.z <= 65535 &&
         kernel.shared_bytes + asked.shared_bytes <= 48u << 10;
}

cudaError_t launch(Machine& its, const void* address, const Configuration& asked,
                   void** arguments) {
  CUstream_st* stream = stream_of(its, asked.stream, "cudaLaunchKernel");
  if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
  static_cast<void>(current(its));
  if (stream->device != current_device()) {
    // "A kernel launch will fail if it is issued to a stream that is not associated to the current
    // device" (CUDA C++ Programming Guide, 6.2.9.3).
    return refuse(its, cudaErrorInvalidResourceHandle,
                  "a launch on a stream of device {} while device {} is current", stream->device,
                  current_device());
  }
  const auto kernel = kernel_of(its, address, stream->device);
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  if (!fits(*kernel, asked)) return cudaErrorInvalidConfiguration;
  auto parameters = std::make_shared<std::vector<std::byte>>(kernel->parameter_bytes);
  for (std::size_t n = 0; n < kernel->parameters.size(); ++n) {
    const ptx::Parameter& one = kernel->parameters[n];
    std::memcpy(parameters->data() + one.offset, arguments[n], one.size_bytes);
  }
  const std::uint64_t seed = mix(mix(its.seed, stream->actor), stream->submitted + 7);
  DeviceState* device = its.devices[static_cast<std::size_t>(stream->device)].get();
  const Stub* stub = &registry().stubs.at(address);
  Operation operation{.what = "kernel " + kernel->name, .duration_ns = kKernelNs};
  operation.body = [&its, stub, kernel, device, parameters, asked, seed](auto& accesses) {
    return run(its, *stub, *kernel, *device,
               {asked.grid, asked.block, static_cast<std::uint32_t>(asked.shared_bytes),
                *parameters, seed, kInstructionsMax},
               accesses);
  };
  its.submit(stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace

void set_twin(const void* stub, Twin twin) {
  const Machine::Lock lock(machine().mutex);
  registry().stubs.at(stub).twin = std::move(twin);
}

std::uint64_t instructions_executed() {
  const Machine::Lock lock(machine().mutex);
  return registry().executed;
}

}  // namespace ziggurat::cuda_double

using namespace ziggurat::cuda_double;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  auto& modules = registry().modules;
  modules.push_back(std::make_unique<Module>());
  modules.back()->wrapper = wrapper;
  return reinterpret_cast<void**>(modules.back().get());
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}  // at exit, with everything else
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

void __cudaRegisterFunction(void** handle, const char* stub, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  registry().stubs[stub] = {reinterpret_cast<Module*>(handle), name, {}, {}};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes,
                                     CUstream_st* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes,
                                       void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

/// The handle is the stub's address.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments,
                          shared_bytes, stream);
}

}  // extern "C"

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes, cudaStream_t stream) {
  return call("cudaLaunchKernel", [&](Machine& its, auto&) {
    return launch(its, stub, {grid, block, shared_bytes, stream}, arguments);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  return call("cudaFuncGetAttributes", [&](Machine& its, auto&) {
    static_cast<void>(current(its));
    const auto kernel = kernel_of(its, stub, current_device());
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    *attributes = cudaFuncAttributes{};
    attributes->sharedSizeBytes = kernel->shared_bytes;
    attributes->localSizeBytes = kernel->local_bytes;
    attributes->maxThreadsPerBlock = static_cast<int>(kernel->threads_max);
    attributes->numRegs = kernel->registers;  // PTX's, more than a GPU needs
    attributes->ptxVersion = attributes->binaryVersion = 80;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* stub,
                                                          int threads, std::size_t) {
  return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&](Machine& its, auto&) {
    static_cast<void>(current(its));
    const auto kernel = kernel_of(its, stub, current_device());
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (threads <= 0 || threads > static_cast<int>(kernel->threads_max)) {
      return cudaErrorInvalidValue;
    }
    *blocks = std::max(1, 2048 / threads);
    return cudaSuccess;
  });
}
