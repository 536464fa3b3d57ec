// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/cuda_stand_in.cc: the CUDA functions that collectives/nccl calls,
// over host memory and a thread for each stream.
//
// ZIGGURAT_DOUBLE_GPUS=3,5: the numbers of this machine's GPUs that this process sees. A rule that
// is broken ends the process with its text and status 86. libcudart_static.a is one object: a
// function that is missing here is a link error.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/collectives/nccl/double/cuda_hooks.h"
#include "tests/collectives/nccl/double/cuda_stand_in.h"

namespace {

using ziggurat::nccl_double::CudaHooks;

[[noreturn]] void broken(const char* rule) {
  std::fprintf(stderr, "CUDA stand-in: %s\n", rule);
  std::fflush(stderr);
  ::_exit(86);
}

struct Allocation {
  std::size_t size = 0;
  int device = 0;
};

std::vector<int> visible_gpus() {
  const char* const text = std::getenv("ZIGGURAT_DOUBLE_GPUS");
  std::vector<int> gpus;
  std::istringstream list(text != nullptr ? text : "");
  for (std::string gpu; std::getline(list, gpu, ',');) gpus.push_back(std::stoi(gpu));
  return gpus;
}

struct Machine {
  std::mutex mutex;
  std::map<const std::byte*, Allocation> memory;
  std::set<cudaStream_t> streams;
  std::size_t most_bytes = 0;
};
Machine& machine() {
  static Machine it;
  return it;
}

thread_local int current_device = 0;
thread_local bool device_chosen = false;
thread_local bool in_host_function = false;

/// "cudaSetDevice: ... Any device memory subsequently allocated from this host thread ... will be
/// physically resident on device" (cuda_runtime_api.h): who never calls it uses device 0, and makes
/// a context there.
void needs_device(const char* call) {
  if (in_host_function) broken("a host function must not make CUDA API calls");
  if (!device_chosen) {
    static std::string text;
    text = std::string(call) + " on a thread that has not called cudaSetDevice";
    broken(text.c_str());
  }
}

}  // namespace

/// A stream: work in order, on a thread.
struct CUstream_st {
  explicit CUstream_st(int its_device) : device(its_device), thread([this] { run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }
  void queue(std::function<void()> work) {
    const std::lock_guard lock(mutex);
    queued.push_back(std::move(work));
    changed.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex);
    return queued.empty() && !busy;
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queued.empty() && !busy; });
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stopping || !queued.empty(); });
      if (queued.empty()) return;
      const auto work = std::move(queued.front());
      queued.pop_front();
      busy = true;
      lock.unlock();
      work();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queued;
  bool busy = false;
  bool stopping = false;
  std::thread thread;
};

namespace {

CUstream_st& known(cudaStream_t stream) {
  Machine& it = machine();
  const std::lock_guard lock(it.mutex);
  if (!it.streams.contains(stream)) broken("a stream that does not exist, or was destroyed");
  return *stream;
}

/// The allocation that holds [address, address + size), or null.
const std::pair<const std::byte* const, Allocation>* holder(const void* address, std::size_t size) {
  const auto* const at = static_cast<const std::byte*>(address);
  auto after = machine().memory.upper_bound(at);
  if (after == machine().memory.begin()) return nullptr;
  --after;
  return at + size <= after->first + after->second.size ? &*after : nullptr;
}

std::byte* device_bytes(const void* address, std::size_t size) {
  const std::lock_guard lock(machine().mutex);
  if (holder(address, size) == nullptr) return nullptr;
  return const_cast<std::byte*>(static_cast<const std::byte*>(address));
}

cudaError_t launch(cudaStream_t stream, cudaHostFn_t work, void* data) {
  return cudaLaunchHostFunc(stream, work, data);
}

}  // namespace

std::size_t ziggurat::nccl_double::device_bytes_most() {
  const std::lock_guard lock(machine().mutex);
  return machine().most_bytes;
}

extern "C" {

__attribute__((visibility("default"))) const CudaHooks* ziggurat_nccl_double_cuda_hooks() {
  static const CudaHooks hooks{.get_device = [](int* device) { return cudaGetDevice(device); },
                               .pci_bus_id = cudaDeviceGetPCIBusId,
                               .pointer_attributes = cudaPointerGetAttributes,
                               .launch = launch,
                               .device_bytes = device_bytes,
                               .device_of_stream = [](cudaStream_t stream) -> int {
                                 const std::lock_guard lock(machine().mutex);
                                 return machine().streams.contains(stream) ? stream->device : -1;
                               }};
  return &hooks;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(visible_gpus().size());
  return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(visible_gpus().size())) {
    return cudaErrorInvalidDevice;
  }
  current_device = device;
  device_chosen = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  const std::vector<int> gpus = visible_gpus();
  if (device < 0 || device >= static_cast<int>(gpus.size())) return cudaErrorInvalidDevice;
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02X:00.0",
                gpus[static_cast<std::size_t>(device)]);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "an error";
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheStandIn"; }

cudaError_t cudaMalloc(void** address, std::size_t size) {
  needs_device("cudaMalloc");
  Machine& it = machine();
  const std::lock_guard lock(it.mutex);
  auto* const bytes = new std::byte[size];
  std::memset(bytes, 0xa5, size);
  it.memory[bytes] = {size, current_device};
  std::size_t all = 0;
  for (const auto& [at, allocation] : it.memory) all += allocation.size;
  it.most_bytes = std::max(it.most_bytes, all);
  *address = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  needs_device("cudaFree");
  Machine& it = machine();
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard lock(it.mutex);
    if (!it.memory.contains(static_cast<std::byte*>(address))) broken("cudaFree of no allocation");
    streams.assign(it.streams.begin(), it.streams.end());
  }
  for (const cudaStream_t stream : streams) {
    if (!stream->idle()) broken("cudaFree while a stream has work: it may use that memory");
  }
  const std::lock_guard lock(it.mutex);
  it.memory.erase(static_cast<std::byte*>(address));
  delete[] static_cast<std::byte*>(address);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const std::lock_guard lock(machine().mutex);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;
  if (const auto* const found = holder(address, 1)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = found->second.device;
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  needs_device("cudaStreamCreateWithFlags");
  *stream = new CUstream_st(current_device);
  const std::lock_guard lock(machine().mutex);
  machine().streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  needs_device("cudaStreamDestroy");
  known(stream);
  {
    const std::lock_guard lock(machine().mutex);
    machine().streams.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  needs_device("cudaStreamQuery");
  return known(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  needs_device("cudaStreamSynchronize");
  known(stream).wait();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t work, void* data) {
  needs_device("cudaLaunchHostFunc");
  known(stream).queue([work, data] {
    in_host_function = true;
    work(data);
    in_host_function = false;
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  needs_device("cudaMemcpyAsync");
  // A copy that begins in device memory and ends outside it.
  for (const void* const address : {static_cast<const void*>(to), from}) {
    const std::lock_guard lock(machine().mutex);
    if (holder(address, 1) != nullptr && holder(address, size) == nullptr) {
      return cudaErrorInvalidValue;
    }
  }
  known(stream).queue([to, from, size] { std::memmove(to, from, size); });
  return cudaSuccess;
}

}  // extern "C"
