// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_context.h: one GPU as this process uses it. Every CUDA call is made through
// this class.
//
// An error that leaves the GPU unusable is latched: the device is then lost for good, and no CUDA
// call is made any more, because the answers of a lost device mean nothing (a wait may return at
// once). Each call is watched (driver_watch.h). Thread-safe. Each call runs with this GPU as the
// thread's current one; a caller's thread is left as it was. For builds with CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "tiers/device/driver_watch.h"

namespace ziggurat {

/// Formats an error: "cudaErrorInvalidValue (invalid argument)".
std::string cuda_text(cudaError_t error);
/// Says why no GPU can be used, after cudaGetDeviceCount() has given an error or none: names a
/// driver that is too old, and the one that this CUDA needs.
std::string why_no_gpu(cudaError_t error);
/// The newest CUDA that the driver supports, "12.4"; empty if there is no driver.
std::string driver_version();

class CudaContext {
 public:
  /// A call, as messages name it: "cudaMemcpyAsync of 4.0 MiB".
  struct Call {
    const char* function;  ///< a literal
    std::uint64_t size_bytes = 0;
  };

  /// `index` is CUDA's number of the GPU, `name` the driver's name for it.
  CudaContext(int index, const std::string& name, DriverDeadlines deadlines);
  ~CudaContext();  ///< all events must have been given back

  int index() const noexcept { return index_; }
  const std::string& description() const noexcept { return description_; }  ///< "cuda0 (NVIDIA A)"

  /// Runs `function`, which makes the one CUDA call that `what` names and returns its result.
  /// Errors: kUnavailable if this call or an earlier one has lost the device; kResourceExhausted,
  /// kUnimplemented or kInvalidArgument for an error that concerns this call alone.
  template <class Function>
  void call(const Call& what, const Function& function) {
    require_present();
    const DriverWatch::Call watched(watch_, what.function, what.size_bytes);
    const Current current(*this);
    check(function(), what);
  }
  /// Makes a call in a destructor: an error is logged. Does nothing on a lost device. Returns
  /// whether the call was made and succeeded.
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

  bool lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  /// Throws if the device is lost. Errors: kUnavailable.
  void require_present() const;
  /// Treats the device as lost after a call whose error alone does not say so.
  void give_up(const std::string& why);

  /// Returns an event that is not in use. The last Event that represents it gives it back when
  /// destroyed.
  cudaEvent_t take_event();
  void give_back(cudaEvent_t event) noexcept;

 private:
  /// Makes the GPU the thread's current one. On a thread of the engine it stays current: to go back
  /// to the GPU with which every thread begins would make a context there, in each rank of a
  /// machine.
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
  mutable std::mutex mutex_;  // guards everything below
  std::string lost_why_;
  int lost_native_ = 0;
  std::vector<cudaEvent_t> idle_events_;
};

}  // namespace ziggurat
