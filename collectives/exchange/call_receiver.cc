// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/call_receiver.cc: the counting that all receivers share.
#include "collectives/exchange/call_receiver.h"

#include <algorithm>

namespace ziggurat {

bool CallReceiver::all_kept() const { return std::ranges::all_of(members_, &Member::kept); }

void CallReceiver::begin_reading(std::size_t place, std::uint64_t address) {
  Member& member = members_[place];
  member.is_read = true;
  member.address = address;
  member.kept = false;
}

}  // namespace ziggurat
