// SPDX-License-Identifier: Apache-2.0
// base/access_ledger.cc: a list, and a look at all of it for each access.
#include "base/access_ledger.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/checksum.h"

namespace ziggurat {
namespace {

const char* verb(AccessLedger::Kind kind) {
  return kind == AccessLedger::Kind::kWrite ? "writes" : "reads";
}

}  // namespace

AccessLedger::Access::Access(Access&& other) noexcept
    : ledger_(std::exchange(other.ledger_, nullptr)), entry_(other.entry_) {}

AccessLedger::Access& AccessLedger::Access::operator=(Access&& other) noexcept {
  if (this != &other) {
    end();
    ledger_ = std::exchange(other.ledger_, nullptr);
    entry_ = other.entry_;
  }
  return *this;
}

void AccessLedger::Access::end() noexcept {
  if (ledger_ == nullptr) return;
  ledger_->entries_.erase(entry_);
  ledger_ = nullptr;
}

AccessLedger::Access AccessLedger::begin(Kind kind, std::span<const std::byte> bytes,
                                         const char* who) {
  if (bytes.empty()) return {};
  ++begun_;
  const bool writes = kind == Kind::kWrite;
  history_ = mix_seed(history_, hash64(std::as_bytes(std::span(who, std::strlen(who))),
                                       2 * bytes.size() + (writes ? 1 : 0)));
  const std::byte* const end = bytes.data() + bytes.size();
  for (const Entry& other : entries_) {
    if (kind == Kind::kRead && other.kind == Kind::kRead) continue;
    if (other.bytes.data() >= end || bytes.data() >= other.bytes.data() + other.bytes.size())
      continue;
    if (conflicts_.size() == kConflictsMax) break;
    conflicts_.push_back(fmt::format("{} {} {} of which {} {} a part at the same time", who,
                                     verb(kind), format_bytes(bytes.size()), other.who,
                                     verb(other.kind)));
  }
  return {*this, entries_.insert(entries_.end(), {bytes, kind, who})};
}

}  // namespace ziggurat
