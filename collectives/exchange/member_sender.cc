// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/member_sender.cc: workers mark chunks; then they are sent in order.
#include "collectives/exchange/member_sender.h"

#include <fmt/format.h>

#include <memory>

#include "collectives/exchange/exchange_call.h"

namespace ziggurat {

std::optional<wire::FrameHeader> ChunkOrder::take() {
  if (ready_.empty() || ready_.begin()->first != next_) return std::nullopt;
  const wire::FrameHeader header = ready_.begin()->second;
  ready_.erase(ready_.begin());
  next_ += header.length;
  return header;
}

std::span<const std::byte> MemberSender::take_small() {
  if (bytes_.size() > wire::kEagerBytes) return {};
  begun_ = sent_ = bytes_.size();
  return bytes_;
}

void MemberSender::begin(bool member_reads) {
  way_ = member_reads ? Way::kLent : Way::kChunks;
  if (way_ == Way::kChunks) send_chunks();
}

void MemberSender::send_chunks() {
  while (in_flight_ < ExchangeCall::kInFlight && begun_ < bytes_.size()) {
    const std::size_t offset = begun_;
    const std::size_t length = wire::chunk_length(offset, bytes_.size());
    begun_ += length;
    ++in_flight_;
    mark_chunk(offset, length);
  }
}

void MemberSender::mark_chunk(std::size_t offset, std::size_t length) {
  const auto header = std::make_shared<wire::FrameHeader>(call_.chunk_header(0, offset, length));
  const auto payload = bytes_.subspan(offset, length);
  const std::uint64_t number = call_.transport().next_payload();
  call_.run_job(
      "hash chunk",
      [this, payload, header, number] {
        header->payload = call_.mark(number, payload, header->offset);
      },
      [this, header] {
        marked_.add(*header);
        send_marked();
      });
}

void MemberSender::send_marked() {
  while (const auto header = marked_.take()) {
    call_.transport().send_bulk(call_.rank_at(place_), *header,
                                bytes_.subspan(header->offset, header->length),
                                [this, held = call_.shared_from_this(), length = header->length] {
                                  sent_ += length;
                                  --in_flight_;
                                  held->moved();
                                  send_chunks();
                                  held->settle();
                                });
  }
}

void MemberSender::was_read() {
  if (!lends() || done()) throw call_.took_what_is_not_lent();
  sent_ = bytes_.size();
  call_.transport().count_taken(call_.rank_at(place_), bytes_.size());
}

}  // namespace ziggurat
