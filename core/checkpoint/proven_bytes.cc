// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/proven_bytes.cc: whoever asks for bytes that are being read waits for them; the
// bytes used longest ago are dropped.
#include "core/checkpoint/proven_bytes.h"

#include "base/bytes.h"

namespace ziggurat {

Task<ProvenBytes::Bytes> ProvenBytes::get(Key key, Size size, const Read& read) {
  if (const auto found = entries_.find(key); found != entries_.end()) {
    const EntryPtr its = found->second;
    co_await its->ready.wait();
    keep(key, its);
    co_return its->bytes;
  }
  const EntryPtr its = std::make_shared<Entry>(reactor_, memory_.take(size.bytes, size.lead_bytes));
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
  keep(key, its);
  co_return its->bytes;
}

/// Returns how many bytes an entry holds: at least a page.
std::uint64_t ProvenBytes::held_bytes(const Entry& entry) {
  return round_up(entry.bytes->span().size(), AlignedBytes::kAlignment);
}

/// Keeps an entry as the one used last. Does not keep an entry that was dropped meanwhile, even if
/// its key is being read again.
void ProvenBytes::keep(const Key& key, const EntryPtr& entry) {
  if (const auto found = entries_.find(key); found == entries_.end() || found->second != entry)
    return;
  if (entry->kept) {
    kept_.splice(kept_.end(), kept_, entry->place);
    return;
  }
  entry->place = kept_.insert(kept_.end(), key);
  entry->kept = true;
  kept_bytes_ += held_bytes(*entry);
  while (kept_bytes_ > kept_bytes_max_ && kept_.size() > 1) {
    const auto oldest = entries_.find(kept_.front());
    kept_bytes_ -= held_bytes(*oldest->second);
    entries_.erase(oldest);
    kept_.pop_front();
  }
}

Task<> run_pass(Reactor& reactor, Workers& workers, const char* name, std::uint64_t size_bytes,
                const std::function<void()>& job) {
  constexpr std::uint64_t kHandedOver = 64 * kKiB;  // some microseconds
  if (size_bytes >= kHandedOver) {
    co_await workers.run(reactor, {name, 2 * size_bytes, true}, job);
  } else {
    job();
  }
}

}  // namespace ziggurat
