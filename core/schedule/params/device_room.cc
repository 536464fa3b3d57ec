// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/device_room.cc: waits for the device's memory.
#include "core/schedule/params/device_room.h"

#include <fmt/format.h>

#include "base/bytes.h"

namespace ziggurat {

DeviceRoom::DeviceRoom(Context& context) : context_(context), returned_(context.cancel) {
  // Memory can come back on any thread, and stall handlers outlive this object. So both callbacks
  // check on the reactor's thread whether it still lives.
  const std::weak_ptr<bool> alive = alive_;
  context.device->on_free([this, alive, &reactor = context.reactor] {
    reactor.post([this, alive] {
      if (!alive.expired()) returned();
    });
  });
  context.reactor.on_stall([this, alive] {
    if (alive.expired() || waiters_ == 0) return;
    if (may_come_back_ && may_come_back_()) return;
    returned_.fail(std::make_exception_ptr(exhausted(0, "nothing on the device can be freed")));
  });
}

DeviceRoom::~DeviceRoom() { context_.device->on_free({}); }

MemoryExhausted DeviceRoom::exhausted(std::uint64_t size_bytes, const std::string& why) const {
  const Account account = context_.device->account();
  return MemoryExhausted(
      {.budget = MemoryBudget::kDevice,
       .had_bytes = account.capacity_bytes(),
       .needed_bytes = account.used_bytes() + size_bytes},
      fmt::format("`device_memory` is too small: {}; the device holds {}", why, account.text()));
}

Task<DeviceBuffer> DeviceRoom::allocate(std::uint64_t size_bytes, Purpose purpose, Free free) {
  for (;;) {
    DeviceBuffer buffer = try_allocate(size_bytes, purpose, free);
    if (buffer) co_return buffer;
    if (size_bytes > context_.device->account().capacity_bytes()) {
      throw exhausted(size_bytes, fmt::format("{} of {} cannot fit even if all else is dropped",
                                              format_bytes(size_bytes), to_string(purpose)));
    }
    co_await wait();
  }
}

Task<> DeviceRoom::wait() {
  returned_.reset();
  ++waiters_;
  std::exception_ptr error;
  try {
    co_await returned_.wait();
  } catch (...) {
    error = std::current_exception();
  }
  --waiters_;
  if (error) std::rethrow_exception(error);
}

DeviceBuffer DeviceRoom::try_allocate(std::uint64_t size_bytes, Purpose purpose, const Free& free) {
  for (;;) {
    DeviceBuffer buffer = context_.device->try_allocate(size_bytes, purpose);
    if (buffer || !free()) return buffer;
  }
}

}  // namespace ziggurat
