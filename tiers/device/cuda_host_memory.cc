// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_host_memory.cc: finds registrations by address, and keeps them while copies are
// under way.
#include "tiers/device/cuda_host_memory.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

std::uintptr_t address_of(const std::byte* data) noexcept {
  return reinterpret_cast<std::uintptr_t>(data);
}

}  // namespace

class CudaHostMemory::Registration final : public HostRegistration {
 public:
  Registration(std::shared_ptr<CudaHostMemory> owner, std::span<std::byte> memory)
      : owner_(std::move(owner)), memory_(memory) {}
  ~Registration() override {
    {
      const std::lock_guard lock(owner_->mutex_);
      owner_->registrations_.erase(address_of(memory_.data()));
    }
    owner_->context_->call_at_end({"cudaHostUnregister", memory_.size()},
                                  [this] { return cudaHostUnregister(memory_.data()); });
  }
  bool quarantined(std::span<const std::byte> memory) const noexcept override {
    return owner_->context_->lost() && owner_->under_way(memory);
  }
  bool covers(std::span<const std::byte> memory) const noexcept {
    return memory.data() >= memory_.data() && memory.size() <= memory_.size() &&
           address_of(memory.data()) - address_of(memory_.data()) <= memory_.size() - memory.size();
  }

 private:
  std::shared_ptr<CudaHostMemory> owner_;
  std::span<std::byte> memory_;
};

/// The host side of one copy.
class CudaHostMemory::UnderWay {
 public:
  UnderWay(std::shared_ptr<CudaHostMemory> owner, std::shared_ptr<Registration> registration,
           Copies::iterator entry)
      : owner_(std::move(owner)), registration_(std::move(registration)), entry_(entry) {}
  ~UnderWay() {
    if (owner_->context_->lost()) return;  // nobody knows whether the copy has ended
    const std::lock_guard lock(owner_->mutex_);
    owner_->copies_.erase(entry_);
  }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  std::shared_ptr<CudaHostMemory> owner_;
  std::shared_ptr<Registration> registration_;  // destroyed first, which may unregister the memory
  Copies::iterator entry_;
};

std::shared_ptr<HostRegistration> CudaHostMemory::add(std::span<std::byte> memory) {
  try {
    context_->call({"cudaHostRegister", memory.size()}, [&] {
      return cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
    });
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnavailable) throw;
    std::string fix = "give the engine a smaller host memory budget";
    if (error.native() == cudaErrorHostMemoryAlreadyRegistered) {
      fix =
          "another owner has registered some of this memory; register it only once, or copy "
          "through memory "
          "of the engine";
    } else if (error.code() == ErrorCode::kUnimplemented) {
      fix = "this platform cannot pin memory that was mapped before; use the host-emulated device";
    }
    throw Error(
        error.code(),
        fmt::format("cannot pin {} of host memory at {} for copies: {} ({})",
                    format_bytes(memory.size()), fmt::ptr(memory.data()), error.what(), fix),
        error.native());
  }
  auto registration = std::make_shared<Registration>(shared_from_this(), memory);
  const std::lock_guard lock(mutex_);
  registrations_.insert_or_assign(address_of(memory.data()), registration);
  return registration;
}

std::shared_ptr<void> CudaHostMemory::begin_copy(std::span<const std::byte> memory) {
  std::shared_ptr<Registration> registration;
  const std::lock_guard lock(mutex_);
  const auto after = registrations_.upper_bound(address_of(memory.data()));
  if (after != registrations_.begin()) registration = std::prev(after)->second.lock();
  if (!registration || !registration->covers(memory)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} cannot copy host memory at {} ({}), which is not registered for copies; "
                    "take it from "
                    "the engine's pool, or register all of it (register_host_memory)",
                    context_->description(), fmt::ptr(memory.data()), format_bytes(memory.size())));
  }
  const auto entry = copies_.emplace(address_of(memory.data()), memory.size());
  return std::make_shared<UnderWay>(shared_from_this(), std::move(registration), entry);
}

bool CudaHostMemory::under_way(std::span<const std::byte> memory) const noexcept {
  const Address begin = address_of(memory.data());
  const Address end = begin + memory.size();
  const std::lock_guard lock(mutex_);
  // A list is enough: few copies are under way, and this is asked only on a lost device.
  for (const auto& [copy_begin, size_bytes] : copies_) {
    if (copy_begin < end && begin < copy_begin + size_bytes) return true;
  }
  return false;
}

}  // namespace ziggurat
