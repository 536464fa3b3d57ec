// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/sum_receiver.cc: adds chunks in order, a few at a time.
#include "collectives/exchange/sum_receiver.h"

#include <cstring>
#include <utility>

#include "collectives/exchange/exchange_call.h"
#include "collectives/rank_sum.h"

namespace ziggurat {

SumReceiver::SumReceiver(ExchangeCall& call, const SumPlan& plan, std::span<const std::byte> term,
                         Made made)
    : CallReceiver(call, call.size()),
      dtype_(plan.dtype),
      sum_(plan.sum),
      own_(term),
      made_(std::move(made)),
      chunks_((sum_.size() + wire::kChunkBytes - 1) / wire::kChunkBytes) {
  for (Member& member : members_) member.expected = sum_.size();
  for (Chunk& chunk : chunks_) {
    chunk.terms.resize(members_.size());
    chunk.marks.resize(members_.size());
  }
}

void SumReceiver::end() {
  for (Chunk& chunk : chunks_) give_back(chunk);
}

void SumReceiver::give_back(Chunk& chunk) {
  for (auto& term : chunk.terms) {
    if (term) call_.transport().return_buffer(std::move(term));
  }
}

void SumReceiver::small_arrived(std::size_t place, const wire::FrameHeader& header,
                                std::span<const std::byte> bytes) {
  auto term = call_.transport().take_buffer();
  std::memcpy(term.get(), bytes.data(), bytes.size());
  chunks_[0].terms[place] = std::move(term);
  members_[place].landed = bytes.size();
  term_arrived(place, 0, header.payload);
}

std::span<std::byte> SumReceiver::landing(std::size_t place, const wire::FrameHeader& header) {
  members_[place].landed += header.length;
  auto& term = chunks_[header.offset / wire::kChunkBytes].terms[place];
  term = call_.transport().take_buffer();
  return {term.get(), header.length};
}

void SumReceiver::chunk_arrived(std::size_t place, const wire::FrameHeader& header) {
  term_arrived(place, header.offset, header.payload);
}

void SumReceiver::term_arrived(std::size_t place, std::size_t offset,
                               const wire::PayloadMark& mark) {
  Chunk& chunk = chunks_[offset / wire::kChunkBytes];
  chunk.marks[place] = mark;
  ++chunk.arrived;
  add_ready();
}

void SumReceiver::read(std::size_t place, std::uint64_t address) {
  begin_reading(place, address);
  for (Chunk& chunk : chunks_) ++chunk.arrived;
  add_ready();
}

void SumReceiver::add_ready() {
  while (in_flight_ < ExchangeCall::kInFlight && next_ < chunks_.size() &&
         chunks_[next_].arrived == members_.size() - 1) {
    ++in_flight_;
    add(next_++);
  }
}

void SumReceiver::add(std::size_t index) {
  Chunk& chunk = chunks_[index];
  const std::size_t offset = index * wire::kChunkBytes;
  const std::size_t length = wire::chunk_length(offset, sum_.size());
  const auto header = std::make_shared<wire::FrameHeader>(call_.chunk_header(1, offset, length));
  for (std::size_t place = 0; place < members_.size(); ++place) {
    if (members_[place].is_read) chunk.terms[place] = call_.transport().take_buffer();
  }
  const std::uint64_t number = call_.transport().next_payload();
  call_.run_job(
      "sum chunk",
      [this, &chunk, offset, length, header, number] {
        add_on_worker(chunk, offset, length);
        if (made_) header->payload = call_.mark(number, sum_.subspan(offset, length), offset);
      },
      [this, &chunk, header] { added(chunk, *header); });
}

void SumReceiver::add_on_worker(Chunk& chunk, std::size_t offset, std::size_t length) {
  std::vector<const std::byte*> terms(members_.size());
  for (std::size_t place = 0; place < members_.size(); ++place) {
    if (place == call_.own_place()) {
      terms[place] = own_.data() + offset;
      continue;
    }
    std::byte* const term = chunk.terms[place].get();
    terms[place] = term;
    if (members_[place].is_read) {
      call_.read_from(place, members_[place].address + offset, {term, length});
      continue;
    }
    auto header = call_.chunk_header(0, offset, length);
    header.payload = chunk.marks[place];
    call_.verify(place, {term, length}, header);
  }
  sum_in_rank_order(terms, dtype_, length / size_bytes(dtype_), sum_.data() + offset);
}

void SumReceiver::added(Chunk& chunk, const wire::FrameHeader& header) {
  give_back(chunk);
  summed_ += header.length;
  for (std::size_t place = 0; place < members_.size(); ++place) {
    Member& member = members_[place];
    member.taken += header.length;
    if (!member.is_read) continue;
    member.landed += header.length;
    if (summed_ == sum_.size()) call_.tell(place, wire::FrameKind::kTaken, 0);
  }
  --in_flight_;
  add_ready();
  if (made_) made_(header);
}

}  // namespace ziggurat
