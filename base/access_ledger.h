// SPDX-License-Identifier: Apache-2.0
// base/access_ledger.h: which bytes are being read and written at this moment, in virtual time.
//
// Where no bytes exist, nothing shows that a buffer was used before its bytes had come, or lent to
// a second user too early. So those who move bytes there say when they begin and when they end. An
// access that overlaps another one in time and place, where one of the two writes, is a conflict:
// what either of them gets depends on chance. Looks at all accesses under way, of which there are
// few. For one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

namespace ziggurat {

class AccessLedger {
 public:
  enum class Kind : std::uint8_t { kRead, kWrite };

 private:
  struct Entry {
    std::span<const std::byte> bytes;
    Kind kind;
    const char* who;
  };

 public:
  /// An access under way. The ledger must outlive it.
  class Access {
   public:
    Access() = default;
    Access(Access&& other) noexcept;
    Access& operator=(Access&& other) noexcept;
    ~Access() { end(); }
    void end() noexcept;

   private:
    friend class AccessLedger;
    Access(AccessLedger& ledger, std::list<Entry>::iterator entry)
        : ledger_(&ledger), entry_(entry) {}

    AccessLedger* ledger_ = nullptr;
    std::list<Entry>::iterator entry_{};
  };

  /// Begins an access by `who`, a literal. Nothing is noted of no bytes.
  Access begin(Kind kind, std::span<const std::byte> bytes, const char* who);

  // The same where there may be no ledger: then nothing is noted.
  static Access read(AccessLedger* ledger, std::span<const std::byte> bytes, const char* who) {
    return ledger == nullptr ? Access() : ledger->begin(Kind::kRead, bytes, who);
  }
  static Access write(AccessLedger* ledger, std::span<const std::byte> bytes, const char* who) {
    return ledger == nullptr ? Access() : ledger->begin(Kind::kWrite, bytes, who);
  }

  std::size_t under_way() const noexcept { return entries_.size(); }
  /// Describes the conflicts so far: "a read of the drive writes 4.0 MiB that a copy to the device
  /// reads". At most kConflictsMax are kept.
  const std::vector<std::string>& conflicts() const noexcept { return conflicts_; }
  static constexpr std::size_t kConflictsMax = 16;
  /// Returns how many accesses have begun, and a number that two ledgers share if the same accesses
  /// began in the same order, and hardly ever otherwise.
  std::uint64_t begun() const noexcept { return begun_; }
  std::uint64_t history() const noexcept { return history_; }

 private:
  std::list<Entry> entries_;
  std::vector<std::string> conflicts_;
  std::uint64_t begun_ = 0;
  std::uint64_t history_ = 0;
};

}  // namespace ziggurat
