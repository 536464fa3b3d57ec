// SPDX-License-Identifier: Apache-2.0
// core/schedule/context.cc: copies between host and device, leases that are kept for the whole run,
// and how the failure of a background pipeline becomes the failure of the run.
#include "core/schedule/context.h"

#include <fmt/format.h>

#include <utility>

#include "base/bytes.h"
#include "base/memory_exhausted.h"

namespace ziggurat {

void Context::spawn(Task<> task) { tasks.spawn(guarded(std::move(task))); }

void Context::spawn_local(Task<> task) { local_tasks.spawn(guarded(std::move(task))); }

Task<> Context::copy_to_device(DeviceSpan<std::byte> to, std::span<const std::byte> from) {
  return copy(reactor, *to_device,
              {.destination = reinterpret_cast<std::byte*>(to.address()),
               .source = from.data(),
               .size_bytes = from.size(),
               .direction = Stream::Direction::kToDevice});
}

Task<> Context::copy_to_host(std::span<std::byte> to, DeviceSpan<const std::byte> from) {
  return copy(reactor, *to_host,
              {.destination = to.data(),
               .source = reinterpret_cast<const std::byte*>(from.address()),
               .size_bytes = to.size(),
               .direction = Stream::Direction::kToHost});
}

Task<> Context::copy_rows_to_device(const DeviceRows& to, std::span<const std::byte> from) {
  return copy(reactor, *to_device,
              {.destination = reinterpret_cast<std::byte*>(to.first.address()),
               .source = from.data(),
               .size_bytes = to.first.size(),
               .direction = Stream::Direction::kToDevice,
               .rows = to.count,
               .destination_stride_bytes = to.stride_bytes,
               .source_stride_bytes = to.first.size()});
}

Task<> Context::copy_rows_to_host(std::span<std::byte> to, const DeviceRows& from) {
  return copy(reactor, *to_host,
              {.destination = to.data(),
               .source = reinterpret_cast<const std::byte*>(from.first.address()),
               .size_bytes = from.first.size(),
               .direction = Stream::Direction::kToHost,
               .rows = from.count,
               .destination_stride_bytes = from.first.size(),
               .source_stride_bytes = from.stride_bytes});
}

Task<> Context::run_all(Work all, const std::vector<std::function<void()>>& jobs) {
  if (!jobs.empty()) all.bytes /= jobs.size();
  WorkGroup group(reactor);
  for (const std::function<void()>& job : jobs) group.spawn(workers.run(reactor, all, job));
  co_await group.wait_idle();
}

Lease Context::permanent_lease(Purpose purpose, std::uint64_t size_bytes, const char* holder,
                               int numa_node, bool decides) {
  Lease lease = pool.try_acquire({.purpose = purpose,
                                  .size_bytes = size_bytes,
                                  .need = {},
                                  .holder = holder,
                                  .numa_node = numa_node,
                                  .for_good = true,
                                  .decides = decides});
  if (!lease) {
    const Account account = pool.account();
    throw MemoryExhausted(
        {.budget = MemoryBudget::kHost,
         .had_bytes = account.capacity_bytes(),
         .needed_bytes = account.used_bytes() + size_bytes},
        fmt::format("`host_memory` has no room for {} of {}: it holds {}", format_bytes(size_bytes),
                    to_string(purpose), account.text()));
  }
  return lease;
}

Task<> Context::guarded(Task<> task) {
  std::exception_ptr error;
  try {
    co_await std::move(task);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) fail(error);
}

}  // namespace ziggurat
