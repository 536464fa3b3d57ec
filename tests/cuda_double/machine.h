// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/machine.h: devices, streams, and operations in virtual time.
//
// One mutex guards it all. Operations run on the thread that waits, in the order of their ends; so
// a body never overlaps another, and what may overlap on a GPU is found by clocks (order.h).
#pragma once

#include <driver_types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/device_memory.h"
#include "tests/cuda_double/host_memory.h"
#include "tests/cuda_double/order.h"

namespace ziggurat::cuda_double {

struct Operation;
using OperationRef = std::shared_ptr<Operation>;

/// What a stream does. Its effect is at its end.
struct Operation {
  enum class State { kQueued, kOnHost, kDone };
  std::string what{};  ///< "cudaMemcpyAsync of 64 bytes to the host"
  std::uint64_t duration_ns = 0;
  std::vector<Access> accesses{};  ///< known when it is submitted
  /// An error of it is sticky. It appends what else it touched.
  std::function<cudaError_t(std::vector<Access>&)> body{};
  std::function<void(cudaError_t)> on_host{};  ///< in place of a body: a callback
  bool on_host_after_error = false;            ///< cudaStreamAddCallback
  bool is_section = false;                     ///< of the CPU: it ends when end_section() says so
  std::vector<OperationRef> after{};           ///< besides the one before it on the stream

  // Set by submit() and complete().
  cudaStream_t stream = nullptr;
  std::uint64_t number = 0;  ///< on its stream, from 1
  std::uint64_t submitted_ns = 0;
  std::uint64_t end_ns = 0;
  Clock knows{};
  State state = State::kQueued;
  bool outside_time = false;  ///< a section, or a host function that took longer than our patience
  cudaError_t error = cudaSuccess;
};

struct Pool {
  int device = 0;
  std::uint64_t threshold = 0, max_bytes = 0;
  std::uint64_t reserved = 0, reserved_high = 0, used = 0, used_high = 0;
  int reuse[3] = {1, 1, 1};
  bool is_default = false, destroyed = false;
};

struct DeviceState {
  DeviceState(int index, const Options& options, std::uint64_t seed)
      : memory(options.memory_bytes, seed, options.has_sections),
        capacity_bytes(options.memory_bytes) {
    default_pool.device = index;
    default_pool.is_default = true;
  }
  DeviceMemory memory;
  std::uint64_t capacity_bytes;
  std::uint64_t allocated_bytes = 0;  ///< by cudaMalloc
  std::uint64_t reserved_bytes = 0;   ///< by pools
  Pool default_pool;
  cudaStream_t null_stream = nullptr;
  cudaError_t sticky = cudaSuccess;
  std::vector<Range> late_writes{};  ///< of copies to the host that were under way when it was lost
  bool has_context = false;
};

class Machine {
 public:
  using Lock = std::unique_lock<std::mutex>;

  void reset(std::uint64_t seed, const Options& options);

  void submit(cudaStream_t stream, Operation operation);
  static OperationRef last_of(cudaStream_t stream);
  static bool idle(cudaStream_t stream);
  /// Drives time until the operation is done (null: at once). The host then knows what it knew.
  cudaError_t wait_for(Lock& lock, const OperationRef& operation);
  /// Drives time until the stream has come to the section, and no further.
  cudaError_t wait_for_begin(Lock& lock, const OperationRef& section);
  void end(Operation& section);
  /// Whether it is done; if not, time goes on by one operation.
  cudaError_t query(Lock& lock, const OperationRef& operation);
  /// Completes the operation that ends next, if it ends until `until_ns`. False: there is none.
  bool step(Lock& lock, std::uint64_t until_ns = ~std::uint64_t{0});
  std::optional<std::uint64_t> next_end() const;

  /// Errors of the documentation's rules that the program broke.
  void find(std::string text);
  void fail_device(int device, cudaError_t error);
  /// A copy to the host that was under way when its device was lost may write at any later time.
  void write_late(DeviceState& device);

  /// The device that has this address; null: it is the host's.
  DeviceState* device_of(std::uintptr_t address);
  /// Operations under way that touch the range.
  const Operation* under_way(Range range, bool writing_only = false) const;
  void host_access(Range range, bool writes, const std::string& what);
  /// Forgets what gave or took bytes back: pools above their threshold (driver_types.h:2094-2099).
  void synchronized(int device);

  std::mutex mutex;
  Options options;
  std::uint64_t seed = 0;
  std::uint64_t resets = 0;
  bool installed = false;  // reset() was called
  std::uint64_t now_ns = 0, calls = 0, completions = 0, trace = 0;
  std::uint64_t fail_call_at = 0, fail_completion_at = 0;
  cudaError_t call_error = cudaSuccess, completion_error = cudaSuccess;
  std::string struck;  // by one of the two
  std::vector<std::unique_ptr<DeviceState>> devices;
  HostMemory host;
  std::uint64_t host_allocations = 0;
  Clock host_knows;
  std::uint64_t host_tick = 0;
  AccessHistory history;
  std::map<std::size_t, const void*> newest_sources;  // of copies of a size, for kStaleSource
  std::vector<std::string> findings;
  std::vector<std::unique_ptr<CUstream_st>> streams;                       // destroyed ones too
  std::map<std::pair<std::thread::id, int>, cudaStream_t> thread_streams;  // by device
  std::unordered_map<cudaEvent_t, std::unique_ptr<CUevent_st>> events;     // destroyed ones too
  std::list<Pool> pools;

 private:
  struct Next {
    cudaStream_t stream = nullptr;
    std::uint64_t end_ns = 0;
  };
  Next next() const;
  void complete(Lock& lock, const OperationRef& operation, std::uint64_t end_ns);
  /// Waits on until something has changed; lets time go on, if nothing else does.
  void go_on(Lock& lock, std::chrono::steady_clock::time_point limit, const Operation& operation);
  void go_on_when_quiet(Lock& lock);
  void wait_on_host(Lock& lock, const OperationRef& operation);
  void finish(Operation& operation);
  void serve_host_functions();
  [[noreturn]] void hang(const char* what) const;

  std::condition_variable changed_;
  std::deque<OperationRef> host_functions_;
  std::uint64_t host_functions_queued_ = 0;
  std::uint64_t late_write_count_ = 0;
  bool keeps_time_ = false;         // a thread does, while it is quiet
  int host_thread_of_process_ = 0;  // its pid; a fork has no such thread
};

Machine& machine();
/// True on the thread that runs callbacks: no CUDA there.
bool in_host_function() noexcept;

}  // namespace ziggurat::cuda_double

/// What the opaque handles point to. Alive until reset(), so that a late use is seen.
struct CUstream_st {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  ziggurat::cuda_double::Actor actor = 0;
  std::deque<ziggurat::cuda_double::OperationRef> queue;
  ziggurat::cuda_double::OperationRef last;
  ziggurat::cuda_double::Clock knows;
  std::uint64_t submitted = 0;
  std::uint64_t end_ns = 0;
  bool capturing = false;
  bool implicit = false;  ///< the legacy default stream, or a thread's: nobody's to destroy
  bool destroyed = false;
};

struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  ziggurat::cuda_double::OperationRef recorded;  // null: never
  bool destroyed = false;
};
