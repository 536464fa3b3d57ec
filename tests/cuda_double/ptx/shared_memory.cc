// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/shared_memory.cc: see shared_memory.h.
#include "tests/cuda_double/ptx/shared_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_double/device_memory.h"
#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double::ptx {

void SharedMemory::clear(std::uint64_t poison_seed) {
  fill_with_poison(bytes_.data(), bytes_.size(), poison_seed);
  std::fill(notes_.begin(), notes_.end(), Note{});
  barriers_ = 0;
}

void SharedMemory::check(std::uint64_t offset, std::uint32_t size_bytes) const {
  if (offset % size_bytes != 0) {
    throw Fault(cudaErrorMisalignedAddress,
                fmt::format("{} bytes of shared memory at {} are not aligned", size_bytes, offset));
  }
  if (offset > bytes_.size() || size_bytes > bytes_.size() - offset) {
    throw Fault(cudaErrorIllegalAddress,
                fmt::format("{} bytes of shared memory at {}: the block has {}", size_bytes, offset,
                            bytes_.size()));
  }
}

bool SharedMemory::ordered(const Touch& before, Accessor who) const noexcept {
  if (before.barriers != barriers_) return true;  // never, or before a barrier
  if (before.by_several) return false;
  if (before.thread == who.thread) return true;
  return before.thread / 32u == who.thread / 32u && before.warp_syncs != who.warp_syncs;
}

void SharedMemory::race(std::uint64_t offset, const char* before, const Touch& touch,
                        const char* now, Accessor who) {
  throw Fault(
      cudaErrorLaunchFailure,
      fmt::format("a race in shared memory: byte {} was {} by thread {}{}, and thread {} {} "
                  "it with no barrier between (fix: __syncthreads or __syncwarp)",
                  offset, before, touch.thread, touch.by_several ? " and others" : "", who.thread,
                  now));
}

void SharedMemory::touch(Touch& touch, Accessor who, bool atomic) const noexcept {
  const bool same_interval = touch.barriers == barriers_;
  const bool other = same_interval && touch.thread != who.thread &&
                     (touch.thread / 32u != who.thread / 32u || touch.warp_syncs == who.warp_syncs);
  touch.by_several = same_interval && (touch.by_several || other);
  touch.barriers = barriers_;
  touch.warp_syncs = who.warp_syncs;
  touch.thread = static_cast<std::uint16_t>(who.thread);
  touch.atomic = atomic;
}

const std::byte* SharedMemory::read(std::uint64_t offset, std::uint32_t size_bytes, Accessor who) {
  check(offset, size_bytes);
  for (std::uint64_t at = offset; at < offset + size_bytes; ++at) {
    if (!ordered(notes_[at].write, who)) race(at, "written", notes_[at].write, "reads", who);
    touch(notes_[at].read, who, false);
  }
  return bytes_.data() + offset;
}

std::byte* SharedMemory::write(std::uint64_t offset, std::uint32_t size_bytes, Accessor who) {
  check(offset, size_bytes);
  for (std::uint64_t at = offset; at < offset + size_bytes; ++at) {
    if (!ordered(notes_[at].write, who)) race(at, "written", notes_[at].write, "writes", who);
    if (!ordered(notes_[at].read, who)) race(at, "read", notes_[at].read, "writes", who);
    notes_[at].write.by_several = false;
    notes_[at].write.barriers = ~std::uint32_t{0};
    touch(notes_[at].write, who, false);
  }
  return bytes_.data() + offset;
}

std::byte* SharedMemory::update(std::uint64_t offset, std::uint32_t size_bytes, Accessor who) {
  check(offset, size_bytes);
  for (std::uint64_t at = offset; at < offset + size_bytes; ++at) {
    const Touch& before = notes_[at].write;
    if (!before.atomic && !ordered(before, who)) race(at, "written", before, "updates", who);
    if (!ordered(notes_[at].read, who)) race(at, "read", notes_[at].read, "updates", who);
    touch(notes_[at].write, who, true);
  }
  return bytes_.data() + offset;
}

}  // namespace ziggurat::cuda_double::ptx
