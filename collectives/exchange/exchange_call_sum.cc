// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call_sum.cc: the sums that a call makes, chunk by chunk as
// contributions come.
#include <utility>

#include "collectives/exchange/exchange_call.h"
#include "collectives/rank_sum.h"

namespace ziggurat {

void ExchangeCall::contribution_arrived(std::size_t place, std::size_t offset,
                                        const wire::PayloadMark& mark) {
  const std::size_t index = offset / wire::kChunkBytes;
  chunks_[index].marks[place] = mark;
  ++chunks_[index].arrived;
  pump_sums();
}

void ExchangeCall::pump_sums() {
  while (sums_in_flight_ < kInFlight && next_sum_ < chunks_.size() &&
         chunks_[next_sum_].arrived == state_.size() - 1) {
    ++sums_in_flight_;
    sum_chunk(next_sum_++);
  }
}

void ExchangeCall::sum_chunk(std::size_t index) {
  const std::size_t offset = index * wire::kChunkBytes;
  const std::size_t length = wire::chunk_length(offset, plan_.sum.size());
  const auto result = std::make_shared<wire::FrameHeader>(chunk_header(1, offset, length));
  for (std::size_t place = 0; place < state_.size(); ++place) {
    if (state_[place].is_read) chunks_[index].buffers[place] = transport_.take_buffer();
  }
  const std::uint64_t number = transport_.next_payload();
  transport_.run_job(
      shared_from_this(), "sum chunk",
      [this, index, offset, length, result, number] {
        sum_on_worker(chunks_[index], offset, length);
        if (plan_.results.empty()) return;
        const auto sums = plan_.sum.subspan(offset, length);
        result->payload = transport_.own_seal().mark(number, sums, key_, offset);
      },
      [this, index, length, result] {
        for (auto& buffer : chunks_[index].buffers) {
          if (buffer) transport_.return_buffer(std::move(buffer));
        }
        summed_ += length;
        for (Member& member : state_) {
          member.taken += length;
          if (member.is_read) member.landed += length;
        }
        for (std::size_t place = 0; summed_ == plan_.sum.size() && place < state_.size(); ++place) {
          if (state_[place].is_read) tell(place, wire::FrameKind::kTaken, 0);
        }
        --sums_in_flight_;
        pump_sums();
        if (plan_.results.empty()) return;
        sums_.ready.emplace(result->offset, *result);
        send_results();
      });
}

void ExchangeCall::sum_on_worker(SumChunk& chunk, std::size_t offset, std::size_t length) {
  std::vector<const std::byte*> contributions(state_.size());
  for (std::size_t place = 0; place < state_.size(); ++place) {
    if (is_own(place)) {
      contributions[place] = plan_.contribution.data() + offset;
      continue;
    }
    contributions[place] = chunk.buffers[place].get();
    const Member& member = state_[place];
    if (member.is_read) {
      read_from(place, member.address + offset, {chunk.buffers[place].get(), length});
      continue;
    }
    auto header = chunk_header(0, offset, length);
    header.payload = chunk.marks[place];
    verify(place, {contributions[place], length}, header);
  }
  sum_in_rank_order(contributions, plan_.dtype, length / size_bytes(plan_.dtype),
                    plan_.sum.data() + offset);
}

void ExchangeCall::send_results() {
  while (const auto header = sums_.take()) {
    for (std::size_t place = 0; place < state_.size(); ++place) {
      if (is_own(place)) continue;
      if (state_[place].it_reads) {
        auto ready = *header;
        ready.kind = wire::FrameKind::kReady;
        ready.length = 0;
        ready.address = reinterpret_cast<std::uint64_t>(plan_.sum.data());
        transport_.send_control((*members_)[place], ready, {});
        continue;
      }
      transport_.send_bulk((*members_)[place], *header,
                           plan_.sum.subspan(header->offset, header->length),
                           [self = shared_from_this(), place, length = header->length] {
                             self->state_[place].results_written += length;
                             self->progress();
                             self->settle();
                           });
    }
  }
}

}  // namespace ziggurat
