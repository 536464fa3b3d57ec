// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call.cc: a call from its announcement to its end.
#include "collectives/exchange/exchange_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace ziggurat {
namespace {

using wire::kChunkBytes;
using wire::kEagerBytes;

double seconds(Nanoseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

ExchangeCall::ExchangeCall(ExchangeTransport& transport, const wire::CallKey& key,
                           const wire::CallSpec& spec,
                           std::shared_ptr<const std::vector<int>> members, ExchangePlan plan)
    : transport_(transport),
      key_(key),
      spec_(spec),
      members_(std::move(members)),
      plan_(std::move(plan)),
      state_(members_->size()),
      begun_(transport.reactor().clock().now()),
      done_(transport.reactor()) {
  own_ = place_of(transport.rank());
  state_[own_].announced = true;
  plan_.out.resize(state_.size());
  plan_.in.resize(state_.size());
  if (!plan_.sums) return;
  chunks_.resize((plan_.sum.size() + kChunkBytes - 1) / kChunkBytes);
  for (SumChunk& chunk : chunks_) {
    chunk.buffers.resize(state_.size());
    chunk.marks.resize(state_.size());
  }
}

void ExchangeCall::begin() {
  for (std::size_t place = 0; place < state_.size(); ++place) {
    if (is_own(place)) continue;
    auto header = wire::make_header(wire::FrameKind::kCall, transport_.rank(), key_, spec_);
    std::span<const std::byte> small;
    if (plan_.out[place].size() <= kEagerBytes) {
      small = plan_.out[place];
      state_[place].out_begun = state_[place].out_written = small.size();
    }
    header.length = small.size();
    header.part = transport_.readable_process((*members_)[place]) != 0;
    header.address = reinterpret_cast<std::uint64_t>(plan_.out[place].data());
    // On the reactor: fewer bytes than it takes to wake a worker.
    if (!small.empty())
      header.payload = transport_.own_seal().mark(transport_.next_payload(), small, key_, 0);
    transport_.send_control((*members_)[place], header, small);
  }
  const auto copy = [this] {
    if (plan_.own.from.data() != plan_.own.to.data() && !plan_.own.from.empty()) {
      std::memmove(plan_.own.to.data(), plan_.own.from.data(), plan_.own.from.size());
    }
  };
  if (plan_.own.from.size() <= kEagerBytes) {
    copy();
    copied_ = true;
  } else {
    transport_.run_job(shared_from_this(), "copy own slice", copy, [this] { copied_ = true; });
  }
  pump_sums();
  settle();
}

std::size_t ExchangeCall::place_of(int rank) const {
  const auto found = std::find(members_->begin(), members_->end(), rank);
  if (found == members_->end()) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("sent a frame of {}, of which it is no member", describe()));
  }
  return static_cast<std::size_t>(found - members_->begin());
}

bool ExchangeCall::lacks(int rank, bool all) const {
  const auto found = std::find(members_->begin(), members_->end(), rank);
  if (found == members_->end()) return false;
  const auto place = static_cast<std::size_t>(found - members_->begin());
  const Member& member = state_[place];
  if (!member.announced) return true;
  return all && (member.landed != expected(place) ||
                 (!plan_.results.empty() && member.results_landed != plan_.results[place].size()));
}

std::size_t ExchangeCall::expected(std::size_t place) const {
  return plan_.sums ? plan_.sum.size() : plan_.in[place].size();
}

void ExchangeCall::announced(int rank, const wire::FrameHeader& header,
                             std::span<const std::byte> small) {
  const std::size_t place = place_of(rank);
  if (!spec_.meets(header.spec())) {
    transport_.fail(
        ErrorCode::kInvalidArgument,
        fmt::format("ranks made different calls: rank {} {}, rank {} {} (call {} of "
                    "ranks {}); every rank must make the same calls in the same order",
                    transport_.rank(), wire::describe(spec_), rank, wire::describe(header.spec()),
                    key_.sequence, fmt::join(*members_, ", ")));
    return;
  }
  Member& member = state_[place];
  const std::size_t to_come = expected(place);
  if (member.announced || small.size() != (to_come <= kEagerBytes ? to_come : 0)) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("announced {} twice, or with {} bytes where {} are to come", describe(),
                            small.size(), to_come));
  }
  member.announced = true;
  transport_.waited(rank, transport_.reactor().clock().now() - begun_);
  progress();
  if (!small.empty()) {
    verify(place, small, header);
    member.landed = small.size();
    if (plan_.sums) {
      auto buffer = transport_.take_buffer();
      std::memcpy(buffer.get(), small.data(), small.size());
      chunks_[0].buffers[place] = std::move(buffer);
      contribution_arrived(place, 0, header.payload);
    } else {
      std::memcpy(plan_.in[place].data(), small.data(), small.size());
      member.taken = small.size();
    }
  }
  member.it_reads = header.part != 0;
  begin_reading(place, header);
  pump(place);
  settle();
}

wire::FrameHeader ExchangeCall::chunk_header(std::uint8_t part, std::size_t offset,
                                             std::size_t length) const {
  auto header = wire::make_header(wire::FrameKind::kChunk, transport_.rank(), key_, spec_);
  header.part = part;
  header.offset = offset;
  header.length = length;
  return header;
}

void ExchangeCall::pump(std::size_t place) {
  Member& member = state_[place];
  const std::size_t total = plan_.out[place].size();
  if (member.it_reads) return;
  while (member.announced && member.out_in_flight < kInFlight && member.out_begun < total) {
    const std::size_t offset = member.out_begun;
    const std::size_t length = wire::chunk_length(offset, total);
    member.out_begun += length;
    ++member.out_in_flight;
    hash_chunk(place, offset, length);
  }
}

std::optional<wire::FrameHeader> ExchangeCall::Ordered::take() {
  if (ready.empty() || ready.begin()->first != next) return std::nullopt;
  const wire::FrameHeader header = ready.begin()->second;
  ready.erase(ready.begin());
  next += header.length;
  return header;
}

void ExchangeCall::hash_chunk(std::size_t place, std::size_t offset, std::size_t length) {
  const auto header = std::make_shared<wire::FrameHeader>(chunk_header(0, offset, length));
  const auto payload = plan_.out[place].subspan(offset, length);
  const std::uint64_t number = transport_.next_payload();
  transport_.run_job(
      shared_from_this(), "hash chunk",
      [this, payload, header, number] {
        header->payload = transport_.own_seal().mark(number, payload, key_, header->offset);
      },
      [this, place, header] {
        state_[place].hashed.ready.emplace(header->offset, *header);
        send_hashed(place);
      });
}

void ExchangeCall::send_hashed(std::size_t place) {
  while (const auto header = state_[place].hashed.take()) {
    transport_.send_bulk((*members_)[place], *header,
                         plan_.out[place].subspan(header->offset, header->length),
                         [self = shared_from_this(), place, length = header->length] {
                           Member& member = self->state_[place];
                           member.out_written += length;
                           --member.out_in_flight;
                           self->progress();
                           self->pump(place);
                           self->settle();
                         });
  }
}

std::span<std::byte> ExchangeCall::landing(int rank, const wire::FrameHeader& header) {
  const std::size_t place = place_of(rank);
  Member& member = state_[place];
  const bool result = header.part != 0;
  const std::size_t total =
      result ? (plan_.results.empty() ? 0 : plan_.results[place].size()) : expected(place);
  std::size_t& landed = result ? member.results_landed : member.landed;
  // Its announcement went by the other socket, and may be read later.
  if (!spec_.meets(header.spec()) || header.part > 1 || landed >= total ||
      header.offset != landed || header.length != wire::chunk_length(landed, total)) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("sent {} bytes for offset {} of {}, where {} of {} are to come",
                            header.length, header.offset, describe(), total - landed, total));
  }
  landed += header.length;
  if (result) return plan_.results[place].subspan(header.offset, header.length);
  if (!plan_.sums) return plan_.in[place].subspan(header.offset, header.length);
  auto& buffer = chunks_[header.offset / kChunkBytes].buffers[place];
  buffer = transport_.take_buffer();
  return {buffer.get(), header.length};
}

void ExchangeCall::chunk_arrived(int rank, const wire::FrameHeader& header) {
  const std::size_t place = place_of(rank);
  progress();
  if (header.part == 0 && plan_.sums) {
    contribution_arrived(place, header.offset, header.payload);
    return;
  }
  const auto landed = (header.part != 0 ? plan_.results : plan_.in)[place];
  const auto payload = landed.subspan(header.offset, header.length);
  transport_.run_job(
      shared_from_this(), "verify chunk",
      [this, place, payload, header] { verify(place, payload, header); },
      [this, place, header] {
        Member& member = state_[place];
        (header.part != 0 ? member.results_taken : member.taken) += header.length;
      });
}

/// On a worker, or where there is little.
void ExchangeCall::verify(std::size_t place, std::span<const std::byte> payload,
                          const wire::FrameHeader& header) const {
  const wire::PayloadSeal& seal = transport_.seal_of((*members_)[place]);
  if (seal.matches(header.payload, payload, key_, header.offset)) return;
  throw Error(ErrorCode::kDataLoss,
              fmt::format("what rank {} sent in {} fails its checksum at offset {}: it was damaged "
                          "on the way",
                          (*members_)[place], describe(), header.offset));
}

bool ExchangeCall::complete() const {
  if (!copied_ || (plan_.sums && summed_ != plan_.sum.size())) return false;
  for (std::size_t place = 0; place < state_.size(); ++place) {
    const Member& member = state_[place];
    if (is_own(place)) continue;
    if (!member.announced || member.out_written != plan_.out[place].size() ||
        member.taken != expected(place) || !member.kept) {
      return false;
    }
    if (!plan_.results.empty() && (!member.final_sent || !member.final_came ||
                                   member.results_taken != plan_.results[place].size() ||
                                   member.results_written != plan_.sum.size())) {
      return false;
    }
  }
  return true;
}

void ExchangeCall::job_ends() {
  --jobs_;
  settle();
}

/// Looks whether this was the last thing that it waited for.
void ExchangeCall::settle() {
  if (ended_ || jobs_ > 0) return;
  if (error_ || (finishing_ && complete())) {
    end();
    return;
  }
  send_finals();
  if (!complete()) return;
  finishing_ = true;
  if (plan_.finish) {
    transport_.run_job(shared_from_this(), "finish call", std::exchange(plan_.finish, {}), [] {});
  } else {
    end();
  }
}

void ExchangeCall::fail(std::exception_ptr error) {
  if (!error_) error_ = std::move(error);
  settle();
}

void ExchangeCall::end() {
  ended_ = true;
  for (SumChunk& chunk : chunks_) {
    for (auto& buffer : chunk.buffers) {
      if (buffer) transport_.return_buffer(std::move(buffer));
    }
  }
  if (error_) {
    done_.fail(error_);
  } else {
    done_.set();
  }
  transport_.ended(*this);
}

Task<> ExchangeCall::wait(std::shared_ptr<ExchangeCall> self) { co_await self->done_.wait(); }

std::string ExchangeCall::waiting() const {
  std::vector<int> absent;
  std::vector<int> slow;
  for (std::size_t place = 0; place < state_.size(); ++place) {
    const int rank = (*members_)[place];
    const bool unsent = state_[place].out_written != plan_.out[place].size();
    if (!state_[place].announced) {
      absent.push_back(rank);
    } else if (!is_own(place) && (unsent || lacks(rank, true))) {
      slow.push_back(rank);
    }
  }
  // Who has come may be waiting for the same rank.
  const std::vector<int>& missing = absent.empty() ? slow : absent;
  return fmt::format("{} has waited {:.1f} s for rank{} {}", describe(),
                     seconds(transport_.reactor().clock().now() - begun_),
                     missing.size() == 1 ? "" : "s", fmt::join(missing, ", "));
}

}  // namespace ziggurat
