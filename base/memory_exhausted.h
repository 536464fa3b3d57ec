// SPDX-License-Identifier: Apache-2.0
// base/memory_exhausted.h: the error of a memory budget that is too small, with its numbers. Advice
// is made from these numbers, never from the message.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace ziggurat {

enum class MemoryBudget : std::uint8_t { kDevice, kHost };

struct MemoryShortage {
  MemoryBudget budget = MemoryBudget::kHost;
  std::uint64_t had_bytes = 0;       ///< the budget
  std::uint64_t needed_bytes = 0;    ///< what the program asked for
  std::uint64_t smallest_bytes = 0;  ///< the smallest budget that works; 0 if it is not known
};

/// The code is always kResourceExhausted.
class MemoryExhausted : public Error {
 public:
  MemoryExhausted(const MemoryShortage& shortage, const std::string& message)
      : Error(ErrorCode::kResourceExhausted, message), shortage_(shortage) {}

  const MemoryShortage& shortage() const noexcept { return shortage_; }

 private:
  MemoryShortage shortage_;
};

}  // namespace ziggurat
