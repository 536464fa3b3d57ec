// SPDX-License-Identifier: Apache-2.0
// tiers/cuda_context.h: one GPU as this process uses it: every CUDA call goes through here.
//
// An error that leaves the GPU unusable is latched: the device is lost, once and for good, and no
// CUDA call is made any more, since what a lost device answers means nothing (a wait may return at
// once). Each call is watched (driver_watch.h). Thread-safe; each call runs with this GPU as the
// thread's current one, and a caller's thread is left as it was. For builds with CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "tiers/driver_watch.h"

namespace ziggurat {

/// "cudaErrorInvalidValue (invalid argument)".
std::string cuda_text(cudaError_t error);

class CudaContext {
 public:
  /// A call, for messages: "cudaMemcpyAsync of 4.0 MiB".
  struct Call {
    const char* function;  ///< a literal
    std::uint64_t size_bytes = 0;
  };

  /// `index` as CUDA counts, `name` as the driver says.
  CudaContext(int index, const std::string& name, DriverDeadlines deadlines);
  ~CudaContext();  ///< events must be back

  int index() const noexcept { return index_; }
  const std::string& description() const noexcept { return description_; }  ///< "cuda0 (NVIDIA A)"

  /// Runs `function`, which makes the one CUDA call that `what` names and returns its result.
  /// Errors: kUnavailable when the device is lost, by this call or before; kResourceExhausted,
  /// kUnimplemented or kInvalidArgument for what concerns this call alone.
  template <class Function>
  void call(const Call& what, const Function& function) {
    require_present();
    const DriverWatch::Call watched(watch_, what.function, what.size_bytes);
    const Current current(*this);
    check(function(), what);
  }
  /// For destructors: an error is logged. Does nothing on a lost device. True if it was done.
  template <class Function>
  bool call_at_end(const Call& what, const Function& function) noexcept {
    if (lost()) return false;
    try {
      call(what, function);
      return true;
    } catch (const Error& error) {
      warn(error);
      return false;
    }
  }
  /// call() of cudaEventQuery: false for cudaErrorNotReady.
  bool query(cudaEvent_t event);

  bool lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  /// Errors: kUnavailable when the device is lost.
  void require_present() const;
  /// Gives the device up after a call that says nothing of the kind.
  void give_up(const std::string& why);

  /// An event that nobody uses; the destructor of the last Event to stand for it gives it back.
  cudaEvent_t take_event();
  void give_back(cudaEvent_t event) noexcept;

 private:
  /// Makes the GPU the thread's current one. On a thread of the engine's it stays so: going back to
  /// the GPU that every thread begins with would make a context there, in each rank of a machine.
  class Current {
   public:
    explicit Current(CudaContext& context);
    ~Current();

   private:
    CudaContext& context_;
    int before_ = -1;
  };
  void check(cudaError_t result, const Call& what);
  void lose(cudaError_t error, const std::string& why);
  static void warn(const Error& error) noexcept;

  const int index_;
  const std::string description_;
  DriverWatch watch_;
  std::atomic<bool> lost_{false};
  mutable std::mutex mutex_;  // all below
  std::string lost_why_;
  int lost_native_ = 0;
  std::vector<cudaEvent_t> idle_events_;
};

}  // namespace ziggurat
