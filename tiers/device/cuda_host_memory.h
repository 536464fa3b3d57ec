// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_host_memory.h: host memory that is registered with the CUDA driver, and the
// copies under way to and from it.
//
// Copies of other memory are refused: the driver may copy it piece by piece through a buffer of its
// own while the caller waits (cuda_runtime_api.h: pageable transfers "may be synchronous"), and the
// caller is the reactor. Memory under a copy stays registered until the copy has ended, and for
// ever if the device is lost first. Thread-safe. For builds with CUDA only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "tiers/device/cuda_context.h"
#include "tiers/pool/host_registration.h"

namespace ziggurat {

class CudaHostMemory : public std::enable_shared_from_this<CudaHostMemory> {
 public:
  explicit CudaHostMemory(std::shared_ptr<CudaContext> context) : context_(std::move(context)) {}

  /// Registers memory. Errors: as Device::register_host_memory.
  std::shared_ptr<HostRegistration> add(std::span<std::byte> memory);
  /// Notes that a copy to or from `memory` is under way, until the result is dropped. If it is
  /// dropped on a lost device, the copy counts as under way for ever. Errors: kInvalidArgument
  /// unless all of `memory` lies in one registration.
  std::shared_ptr<void> begin_copy(std::span<const std::byte> memory);

 private:
  class Registration;
  class UnderWay;
  using Address = std::uintptr_t;
  using Copies = std::multimap<Address, std::uint64_t>;  // begin and size

  bool under_way(std::span<const std::byte> memory) const noexcept;

  const std::shared_ptr<CudaContext> context_;
  mutable std::mutex mutex_;  // guards everything below
  std::map<Address, std::weak_ptr<Registration>> registrations_;
  Copies copies_;
};

}  // namespace ziggurat
