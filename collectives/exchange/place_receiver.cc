// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/place_receiver.cc: workers check bytes that came, and read bytes that are
// lent.
#include "collectives/exchange/place_receiver.h"

#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "collectives/exchange/exchange_call.h"

namespace ziggurat {

PlaceReceiver::PlaceReceiver(ExchangeCall& call, std::uint8_t part,
                             std::vector<std::span<std::byte>> in, std::span<const std::byte> own)
    : CallReceiver(call, in.size()),
      part_(part),
      in_(std::move(in)),
      readings_(in_.size()),
      own_(own) {
  for (std::size_t place = 0; place < in_.size(); ++place)
    members_[place].expected = in_[place].size();
}

void PlaceReceiver::begin() {
  const std::span<std::byte> to = in_[call_.own_place()];
  const std::span<const std::byte> from = own_.first(to.empty() ? 0 : own_.size());
  const auto copy = [from, to] { copy_bytes(from, to); };
  if (from.size() <= wire::kEagerBytes) {
    copy();
    copied_ = true;
  } else {
    call_.run_job("copy own slice", copy, [this] { copied_ = true; });
  }
}

void PlaceReceiver::small_arrived(std::size_t place, const wire::FrameHeader&,
                                  std::span<const std::byte> bytes) {
  std::memcpy(in_[place].data(), bytes.data(), bytes.size());
  members_[place].landed = members_[place].taken = bytes.size();
}

std::span<std::byte> PlaceReceiver::landing(std::size_t place, const wire::FrameHeader& header) {
  members_[place].landed += header.length;
  return in_[place].subspan(header.offset, header.length);
}

void PlaceReceiver::chunk_arrived(std::size_t place, const wire::FrameHeader& header) {
  const auto payload = in_[place].subspan(header.offset, header.length);
  call_.run_job(
      "verify chunk", [this, place, payload, header] { call_.verify(place, payload, header); },
      [this, place, header] { members_[place].taken += header.length; });
}

void PlaceReceiver::read(std::size_t place, std::uint64_t address) {
  begin_reading(place, address);
  read_ahead(place);
}

void PlaceReceiver::read_ahead(std::size_t place) {
  Reading& reading = readings_[place];
  const std::span<std::byte> in = in_[place];
  while (reading.in_flight < ExchangeCall::kInFlight && reading.begun < in.size()) {
    const std::size_t offset = reading.begun;
    const auto into = in.subspan(offset, wire::chunk_length(offset, in.size()));
    reading.begun += into.size();
    ++reading.in_flight;
    call_.run_job(
        "read chunk",
        [this, place, into, address = members_[place].address + offset] {
          call_.read_from(place, address, into);
        },
        [this, place, length = into.size()] {
          --readings_[place].in_flight;
          members_[place].landed += length;
          members_[place].taken += length;
          call_.moved();
          if (taken(place)) call_.tell(place, wire::FrameKind::kTaken, part_);
          read_ahead(place);
        });
  }
}

void PlaceReceiver::read_chunk(std::size_t place, const wire::FrameHeader& header) {
  const auto into =
      in_[place].subspan(header.offset, wire::chunk_length(header.offset, in_[place].size()));
  members_[place].landed += into.size();
  call_.run_job(
      "read sums",
      [this, place, into, address = header.address + header.offset] {
        call_.read_from(place, address, into);
      },
      [this, place, length = into.size()] {
        members_[place].taken += length;
        if (taken(place)) call_.tell(place, wire::FrameKind::kTaken, part_);
      });
}

bool PlaceReceiver::done() const {
  if (!copied_ || !all_kept()) return false;
  for (std::size_t place = 0; place < members_.size(); ++place) {
    if (place != call_.own_place() && !taken(place)) return false;
  }
  return true;
}

}  // namespace ziggurat
