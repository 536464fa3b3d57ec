// SPDX-License-Identifier: Apache-2.0
// tiers/device/device_memory.cc: an Arena, an Account and the events of each range under one mutex.
#include "tiers/device/device_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

void forget_happened(std::vector<Event>& events) {
  std::erase_if(events, [](const Event& event) { return event.happened(); });
}

bool same_queue(const Event& a, const Event& b) {
  return a.state() == b.state() ||
         (a.state()->queue() != nullptr && a.state()->queue() == b.state()->queue());
}

/// Adds an event. The latest event of a queue replaces those before it.
void add(std::vector<Event>& events, const Event& event) {
  forget_happened(events);
  if (event.happened()) return;
  for (Event& other : events) {
    if (!same_queue(other, event)) continue;
    if (other.state()->number() < event.state()->number()) other = event;
    return;
  }
  events.push_back(event);
}

}  // namespace

DeviceMemory::~DeviceMemory() {
  ZIGGURAT_CHECK(ranges_.empty(), "a device goes away while {} buffers are out: {}", ranges_.size(),
                 account_.text());
}

std::uint64_t DeviceMemory::offset_of(const std::byte* address) const noexcept {
  // Computed with integers, because the address may be anywhere. An address below the base wraps,
  // to past every buffer.
  return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(base_);
}

/// Returns the buffer that begins at or before `offset`; end() if none does.
DeviceMemory::Ranges::iterator DeviceMemory::range_of(std::uint64_t offset) {
  const auto after = ranges_.upper_bound(offset);
  return after == ranges_.begin() ? ranges_.end() : std::prev(after);
}

std::byte* DeviceMemory::try_allocate(std::uint64_t size_bytes, Purpose purpose) {
  ZIGGURAT_CHECK(size_bytes > 0, "a device buffer of nothing, for {}", to_string(purpose));
  const std::lock_guard lock(mutex_);
  if (size_bytes > arena_.size_bytes()) return nullptr;
  std::uint64_t range = staggered_bytes(size_bytes, alignment_bytes_);
  auto offset = arena_.allocate(range);
  if (!offset) {  // staggering only makes things faster: a buffer that fits without it is not
                  // refused
    range = round_up(size_bytes, alignment_bytes_);
    offset = arena_.allocate(range);
  }
  if (!offset) return nullptr;
  ranges_.emplace(*offset, Range{.range_bytes = range,
                                 .size_bytes = size_bytes,
                                 .before = inherit(*offset, *offset + range),
                                 .uses = {}});
  account_.add(purpose, range);
  return base_ + *offset;
}

/// Cuts a vacated range that contains `at` into two.
void DeviceMemory::cut(std::uint64_t at) {
  const auto after = vacated_.lower_bound(at);
  if (after == vacated_.begin()) return;
  const auto around = std::prev(after);
  if (around->second.end <= at) return;
  vacated_.emplace(at, around->second);
  around->second.end = at;
}

/// Returns the events of the vacated ranges in [begin, end), and ends these ranges.
DeviceMemory::Events DeviceMemory::inherit(std::uint64_t begin, std::uint64_t end) {
  cut(begin);
  cut(end);
  Events events;
  auto vacated = vacated_.lower_bound(begin);
  while (vacated != vacated_.end() && vacated->first < end) {
    for (const Event& event : vacated->second.events) add(events, event);
    vacated = vacated_.erase(vacated);
  }
  return events;
}

void DeviceMemory::free(std::byte* data, Purpose purpose) noexcept {
  std::function<void()> callback;
  Events ended;  // destroyed after the lock
  {
    const std::lock_guard lock(mutex_);
    const std::uint64_t offset = offset_of(data);
    const auto found = ranges_.find(offset);
    ZIGGURAT_CHECK(found != ranges_.end(), "a buffer that this device never lent");
    Range& range = found->second;
    Events events = std::move(range.before);
    for (const Event& event : range.uses) add(events, event);
    forget_happened(events);
    if (!events.empty()) {
      const std::uint64_t end = offset + range.range_bytes;
      vacated_.emplace(offset, Vacated{.end = end, .events = std::move(events)});
    }
    arena_.free(offset, range.range_bytes);
    account_.subtract(purpose, range.range_bytes);
    ended = std::move(range.uses);
    ranges_.erase(found);
    callback = on_free_;
  }
  if (callback) callback();
}

bool DeviceMemory::contains(const std::byte* address, std::uint64_t size_bytes) const {
  const std::uint64_t offset = offset_of(address);
  const std::lock_guard lock(mutex_);
  const auto after = ranges_.upper_bound(offset);
  if (after == ranges_.begin()) return false;
  const auto& [begin, range] = *std::prev(after);
  const std::uint64_t inside = offset - begin;
  return inside <= range.size_bytes && size_bytes <= range.size_bytes - inside;
}

void DeviceMemory::used_until(const std::byte* address, const Event& event) {
  const std::lock_guard lock(mutex_);
  const auto range = range_of(offset_of(address));
  ZIGGURAT_CHECK(range != ranges_.end(), "memory that is not in one of the device's buffers");
  add(range->second.uses, event);
}

std::vector<Event> DeviceMemory::before_use(const std::byte* address) {
  const std::lock_guard lock(mutex_);
  const auto range = range_of(offset_of(address));
  ZIGGURAT_CHECK(range != ranges_.end(), "memory that is not in one of the device's buffers");
  forget_happened(range->second.before);
  return range->second.before;
}

std::vector<Event> DeviceMemory::pending() {
  const std::lock_guard lock(mutex_);
  Events events;
  for (const auto& [begin, vacated] : vacated_) {
    for (const Event& event : vacated.events) add(events, event);
  }
  for (const auto& [begin, range] : ranges_) {
    for (const Event& event : range.before) add(events, event);
    for (const Event& event : range.uses) add(events, event);
  }
  return events;
}

Account DeviceMemory::account() const {
  const std::lock_guard lock(mutex_);
  return account_;
}

void DeviceMemory::on_free(std::function<void()> callback) {
  const std::lock_guard lock(mutex_);
  on_free_ = std::move(callback);
}

}  // namespace ziggurat
