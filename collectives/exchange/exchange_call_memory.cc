// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call_memory.cc: a call between ranks that read each other's memory.
//
// A rank that fails gives its buffers back to its caller, and whoever is reading them then reads
// what they hold next. So a reader ends its call only when the lender says that they were still
// lent when all was read; and a sum is final, for whoever got it by whatever way, when the lenders
// of all its terms have said so to the rank that made it.
#include <fmt/format.h>

#include <algorithm>

#include "collectives/exchange/exchange_call.h"
#include "collectives/exchange/peer_memory.h"

namespace ziggurat {
void ExchangeCall::tell(std::size_t place, wire::FrameKind kind, std::uint8_t part) {
  auto header = wire::make_header(kind, transport_.rank(), key_, spec_);
  header.part = part;
  transport_.send_control((*members_)[place], header, {});
}

void ExchangeCall::begin_reading(std::size_t place, const wire::FrameHeader& header) {
  Member& member = state_[place];
  const bool readable = transport_.readable_process((*members_)[place]) != 0;
  if (!readable || expected(place) <= wire::kEagerBytes) return;
  member.is_read = true;
  member.address = header.address;
  member.kept = false;
  if (!plan_.sums) return read_ahead(place);
  for (SumChunk& chunk : chunks_) ++chunk.arrived;
  pump_sums();
}

void ExchangeCall::read_ahead(std::size_t place) {
  Member& member = state_[place];
  const std::span<std::byte> in = plan_.in[place];
  while (member.reads_in_flight < kInFlight && member.read_begun < in.size()) {
    const std::size_t offset = member.read_begun;
    const auto into = in.subspan(offset, wire::chunk_length(offset, in.size()));
    member.read_begun += into.size();
    ++member.reads_in_flight;
    transport_.run_job(
        shared_from_this(), "read chunk",
        [this, place, into, address = member.address + offset] { read_from(place, address, into); },
        [this, place, length = into.size()] {
          Member& from = state_[place];
          --from.reads_in_flight;
          from.landed += length;
          from.taken += length;
          progress();
          if (from.taken == expected(place)) tell(place, wire::FrameKind::kTaken, 0);
          read_ahead(place);
        });
  }
}

/// On a worker.
void ExchangeCall::read_from(std::size_t place, std::uint64_t address,
                             std::span<std::byte> into) const {
  try {
    read_memory(transport_.readable_process((*members_)[place]), address, into);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("rank {} {}", (*members_)[place], error.what()));
  }
}

void ExchangeCall::results_ready(int rank, const wire::FrameHeader& header) {
  const std::size_t place = place_of(rank);
  Member& member = state_[place];
  const std::size_t total = plan_.results.empty() ? 0 : plan_.results[place].size();
  if (transport_.readable_process(rank) == 0 || header.offset != member.results_landed ||
      header.offset >= total) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("lends results at offset {} of {}, where {} of {} are to come",
                            header.offset, describe(), total - member.results_landed, total));
  }
  const auto into =
      plan_.results[place].subspan(header.offset, wire::chunk_length(header.offset, total));
  member.results_landed += into.size();
  progress();
  transport_.run_job(
      shared_from_this(), "read sums",
      [this, place, into, address = header.address + header.offset] {
        read_from(place, address, into);
      },
      [this, place, total, length = into.size()] {
        Member& from = state_[place];
        from.results_taken += length;
        if (from.results_taken == total) tell(place, wire::FrameKind::kTaken, 1);
      });
}

void ExchangeCall::was_taken(int rank, std::uint8_t part) {
  const std::size_t place = place_of(rank);
  Member& member = state_[place];
  std::size_t& written = part == 0 ? member.out_written : member.results_written;
  const std::size_t total = part == 0 ? plan_.out[place].size() : plan_.sum.size();
  if (!member.it_reads || part > 1 || written == total) {
    throw Error(ErrorCode::kUnavailable, fmt::format("took what {} does not lend", describe()));
  }
  written = total;
  transport_.count_taken(rank, total);
  if (part == 0) tell(place, wire::FrameKind::kKept, 0);
  progress();
  settle();
}

void ExchangeCall::was_kept(int rank, std::uint8_t part) {
  Member& member = state_[place_of(rank)];
  (part == 0 ? member.kept : member.final_came) = true;
  progress();
  settle();
}

/// All that this rank sums is summed, of terms that were whole.
void ExchangeCall::send_finals() {
  if (plan_.results.empty() || sums_.next != plan_.sum.size()) return;
  if (!std::ranges::all_of(state_, &Member::kept)) return;
  for (std::size_t place = 0; place < state_.size(); ++place) {
    Member& member = state_[place];
    if (is_own(place) || member.final_sent || !member.announced) continue;
    if (member.it_reads && member.results_written != plan_.sum.size()) continue;
    member.final_sent = true;
    tell(place, wire::FrameKind::kKept, 1);
  }
}

}  // namespace ziggurat
