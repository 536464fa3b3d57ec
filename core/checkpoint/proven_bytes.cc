// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/proven_bytes.cc: who asks while they are read waits; those used longest ago go.
#include "core/checkpoint/proven_bytes.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

}  // namespace

AlignedBytes::AlignedBytes(std::uint64_t size_bytes)
    : memory_(
          static_cast<std::byte*>(std::aligned_alloc(kPageBytes, round_up(size_bytes, kPageBytes))),
          &std::free),
      size_(size_bytes) {
  if (!memory_) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("no memory for {} of state", format_bytes(size_bytes)));
  }
}

Task<ProvenBytes::Bytes> ProvenBytes::get(Key key, std::uint64_t size_bytes, const Read& read) {
  if (const auto found = entries_.find(key); found != entries_.end()) {
    const EntryPtr its = found->second;
    co_await its->ready.wait();
    keep(key, *its);
    co_return its->bytes;
  }
  const EntryPtr its = std::make_shared<Entry>(reactor_, size_bytes);
  entries_[key] = its;
  std::exception_ptr error;
  try {
    co_await read(its->bytes->span());
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    entries_.erase(key);
    its->ready.fail(error);
    std::rethrow_exception(error);
  }
  its->ready.set();
  keep(key, *its);
  co_return its->bytes;
}

/// As the one used last.
void ProvenBytes::keep(const Key& key, const Entry& entry) {
  if (!entries_.contains(key)) return;
  if (const auto found = std::ranges::find(kept_, key); found != kept_.end()) {
    kept_.splice(kept_.end(), kept_, found);
    return;
  }
  kept_.push_back(key);
  kept_bytes_ += entry.bytes->span().size();
  while (kept_bytes_ > kept_bytes_max_ && kept_.size() > 1) {
    const auto oldest = entries_.find(kept_.front());
    kept_bytes_ -= oldest->second->bytes->span().size();
    entries_.erase(oldest);
    kept_.pop_front();
  }
}

}  // namespace ziggurat
