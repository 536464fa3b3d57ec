// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/sum_results.cc: sends sums in order, receives sums, and tells when they are
// final.
#include "collectives/exchange/sum_results.h"

#include <fmt/format.h>

#include "base/error.h"
#include "collectives/exchange/exchange_call.h"

namespace ziggurat {

SumResults::SumResults(ExchangeCall& call, std::span<const std::byte> sum,
                       const std::vector<std::span<std::byte>>& results)
    : call_(call), sum_(sum), receiver_(call, 1, results, {}), members_(results.size()) {}

void SumResults::made(const wire::FrameHeader& chunk) {
  made_.add(chunk);
  while (const auto header = made_.take()) {
    for (std::size_t place = 0; place < members_.size(); ++place) {
      if (place == call_.own_place()) continue;
      if (call_.lends_to(place)) {
        auto ready = *header;
        ready.kind = wire::FrameKind::kReady;
        ready.length = 0;
        ready.address = reinterpret_cast<std::uint64_t>(sum_.data());
        call_.transport().send_control(call_.rank_at(place), ready, {});
        continue;
      }
      call_.transport().send_bulk(
          call_.rank_at(place), *header, sum_.subspan(header->offset, header->length),
          [this, held = call_.shared_from_this(), place, length = header->length] {
            members_[place].sent += length;
            held->moved();
            held->settle();
          });
    }
  }
}

void SumResults::ready(std::size_t place, const wire::FrameHeader& header) {
  const std::size_t total = receiver_.expected(place);
  const std::size_t landed = receiver_.landed(place);
  if (!call_.reads_from(place) || header.offset != landed || header.offset >= total) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("lends results at offset {} of {}, which still expects {} of {} bytes",
                            header.offset, call_.describe(), total - landed, total));
  }
  call_.moved();
  receiver_.read_chunk(place, header);
}

void SumResults::was_read(std::size_t place) {
  Member& member = members_[place];
  if (!call_.lends_to(place) || sent_to(member)) throw call_.took_what_is_not_lent();
  member.sent = sum_.size();
  call_.transport().count_taken(call_.rank_at(place), sum_.size());
}

void SumResults::send_finals() {
  if (made_.taken() != sum_.size() || !call_.terms_were_kept()) return;
  for (std::size_t place = 0; place < members_.size(); ++place) {
    Member& member = members_[place];
    if (place == call_.own_place() || member.final_sent || !call_.has_announced(place)) continue;
    if (call_.lends_to(place) && !sent_to(member)) continue;
    member.final_sent = true;
    call_.tell(place, wire::FrameKind::kKept, 1);
  }
}

bool SumResults::lacks(std::size_t place) const {
  return receiver_.landed(place) != receiver_.expected(place);
}

bool SumResults::done() const {
  for (std::size_t place = 0; place < members_.size(); ++place) {
    const Member& member = members_[place];
    if (place == call_.own_place()) continue;
    if (!member.final_sent || !member.final_came || !receiver_.taken(place) || !sent_to(member))
      return false;
  }
  return true;
}

}  // namespace ziggurat
