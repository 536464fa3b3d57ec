// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/device_room.h: memory of the device for what is needed during a step.
// Whoever finds too little waits until some comes back. Reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/memory_exhausted.h"
#include "core/schedule/context.h"

namespace ziggurat {

class DeviceRoom {
 public:
  explicit DeviceRoom(Context& context);
  ~DeviceRoom();
  DeviceRoom(const DeviceRoom&) = delete;
  DeviceRoom& operator=(const DeviceRoom&) = delete;

  /// Frees something on the device. Returns false if there is nothing that may be freed.
  using Free = std::function<bool()>;
  /// Allocates memory; calls `free` while there is too little, and then waits. Errors:
  /// kResourceExhausted with the device's account if no memory can come back.
  Task<DeviceBuffer> allocate(std::uint64_t size_bytes, Purpose purpose, Free free);
  /// Does not wait: returns an empty buffer if there is too little.
  DeviceBuffer try_allocate(std::uint64_t size_bytes, Purpose purpose, const Free& free);
  /// Waits until memory may have come back since this call. Errors: as allocate()'s.
  Task<> wait();
  /// Notes that memory came back, or may be freed now: calls that wait in allocate() try again.
  void returned() { returned_.set(); }
  /// Lets calls that wait go on waiting at a lock-up while `may_come_back` says that memory may
  /// come back.
  void wait_while(std::function<bool()> may_come_back) {
    may_come_back_ = std::move(may_come_back);
  }
  /// Makes the error for `size_bytes` that do not fit on the device.
  MemoryExhausted exhausted(std::uint64_t size_bytes, const std::string& why) const;

 private:
  Context& context_;
  Signal returned_;
  std::size_t waiters_ = 0;
  std::function<bool()> may_come_back_;  // may be empty
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ziggurat
