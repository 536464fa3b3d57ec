// SPDX-License-Identifier: Apache-2.0
// tests/support/recording_policy.h: the memory policy of a machine with as many NUMA nodes as a
// test needs: it accepts what is asked, keeps it, and answers as if it had been done.
#pragma once

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "tiers/pool/memory_policy.h"

namespace ziggurat::test {

class RecordingPolicy final : public MemoryPolicy {
 public:
  struct Call {
    const std::byte* begin;
    std::uint64_t size_bytes;
    int numa_node;
    bool operator==(const Call&) const = default;
  };

  int refusal = 0;     ///< errno of every prefer(); 0: accepted
  int full_node = -1;  ///< pages asked for here lie on the node after it

  int prefer(std::span<std::byte> bytes, int numa_node) override {
    const std::lock_guard lock(mutex_);
    calls_.push_back({bytes.data(), bytes.size(), numa_node});
    return refusal;
  }
  int node_of(const std::byte* address) override {
    if (refusal != 0) return -refusal;
    const int asked = asked_for(address);
    return asked >= 0 && asked == full_node ? asked + 1 : asked;
  }

  /// The node that the page at `address` was asked for last; -ENOENT: nobody did.
  int asked_for(const std::byte* address) const {
    const std::lock_guard lock(mutex_);
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
      if (address >= call->begin && address < call->begin + call->size_bytes)
        return call->numa_node;
    }
    return -ENOENT;
  }
  std::vector<Call> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Call> calls_;
};

}  // namespace ziggurat::test
