// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_call.cc: announces a call, gives frames to their sender or
// receiver, and ends the call.
#include "collectives/exchange/exchange_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "collectives/exchange/peer_memory.h"
#include "collectives/exchange/place_receiver.h"
#include "collectives/exchange/sum_receiver.h"

namespace ziggurat {
namespace {

using wire::kEagerBytes;

double seconds(Nanoseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

ExchangeCall::ExchangeCall(ExchangeTransport& transport, const wire::CallKey& key,
                           const CallSpec& spec, Members members, ExchangePlan plan)
    : transport_(transport),
      key_(key),
      spec_(spec),
      members_(std::move(members)),
      finish_(std::move(plan.finish)),
      begun_(transport.reactor().clock().now()),
      done_(transport.reactor()) {
  own_ = place_of(transport.rank());
  peers_.reserve(size());
  for (std::size_t place = 0; place < size(); ++place)
    peers_.push_back({place == own_, MemberSender(*this, place, plan.out[place])});
  if (!plan.sum) {
    receiver_ = std::make_unique<PlaceReceiver>(*this, 0, std::move(plan.in), plan.out[own_]);
    return;
  }
  SumReceiver::Made made;
  if (!plan.sum->results.empty()) {
    results_ = std::make_unique<SumResults>(*this, plan.sum->sum, plan.sum->results);
    made = [this](const wire::FrameHeader& chunk) { results_->made(chunk); };
  }
  receiver_ = std::make_unique<SumReceiver>(*this, *plan.sum, plan.out[own_], std::move(made));
}

void ExchangeCall::begin() {
  for (std::size_t place = 0; place < size(); ++place) {
    if (place != own_) announce(place);
  }
  receiver_->begin();
  settle();
}

void ExchangeCall::announce(std::size_t place) {
  MemberSender& sender = peers_[place].sender;
  const std::span<const std::byte> small = sender.take_small();
  auto header = wire::make_header(wire::FrameKind::kCall, transport_.rank(), key_, spec_);
  header.length = small.size();
  header.part = reads_from(place);
  header.address = sender.address();
  // Marked on the reactor's thread: these are so few bytes that to wake a worker would take longer.
  if (!small.empty()) header.payload = mark(transport_.next_payload(), small, 0);
  transport_.send_control(rank_at(place), header, small);
}

std::optional<std::size_t> ExchangeCall::find_place(int rank) const {
  const auto found = std::find(members_->begin(), members_->end(), rank);
  if (found == members_->end()) return std::nullopt;
  return static_cast<std::size_t>(found - members_->begin());
}

std::size_t ExchangeCall::place_of(int rank) const {
  if (const auto place = find_place(rank)) return *place;
  throw Error(
      ErrorCode::kUnavailable,
      fmt::format("sent a frame for {}, but is not one of the ranks of that call", describe()));
}

bool ExchangeCall::lacks(int rank, bool all) const {
  const auto place = find_place(rank);
  if (!place) return false;
  if (!has_announced(*place)) return true;
  return all && (receiver_->landed(*place) != receiver_->expected(*place) ||
                 (results_ && results_->lacks(*place)));
}

void ExchangeCall::announced(int rank, const wire::FrameHeader& header,
                             std::span<const std::byte> small) {
  const std::size_t place = place_of(rank);
  if (!spec_.meets(header.spec())) {
    transport_.fail(
        ErrorCode::kInvalidArgument,
        fmt::format("ranks made different calls: rank {} {}, rank {} {} (call {} of "
                    "ranks {}); let every rank make the same calls in the same order",
                    transport_.rank(), ziggurat::describe(spec_), rank,
                    ziggurat::describe(header.spec()), key_.sequence, fmt::join(*members_, ", ")));
    return;
  }
  Peer& peer = peers_[place];
  const std::size_t to_come = receiver_->expected(place);
  if (peer.announced || small.size() != (to_come <= kEagerBytes ? to_come : 0)) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("announced {} a second time, or with {} bytes instead of the expected {}",
                    describe(), small.size(), to_come));
  }
  peer.announced = true;
  transport_.waited(rank, transport_.reactor().clock().now() - begun_);
  moved();
  if (!small.empty()) {
    verify(place, small, header);
    receiver_->small_arrived(place, header, small);
  }
  if (reads_from(place) && to_come > kEagerBytes) receiver_->read(place, header.address);
  peer.sender.begin(/*member_reads=*/header.part != 0);
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

CallReceiver* ExchangeCall::receiver_of(std::uint8_t part) {
  if (part == 0) return receiver_.get();
  return part == 1 && results_ ? &results_->receiver() : nullptr;
}

std::span<std::byte> ExchangeCall::landing(int rank, const wire::FrameHeader& header) {
  const std::size_t place = place_of(rank);
  CallReceiver* const receiver = receiver_of(header.part);
  const std::size_t total = receiver ? receiver->expected(place) : 0;
  const std::size_t landed = receiver ? receiver->landed(place) : 0;
  // The member's announcement came by the other channel, and may be read later.
  if (!spec_.meets(header.spec()) || landed >= total || header.offset != landed ||
      header.length != wire::chunk_length(landed, total)) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("sent {} bytes for offset {} of {}, which still expects {} of {} bytes",
                            header.length, header.offset, describe(), total - landed, total));
  }
  return receiver->landing(place, header);
}

void ExchangeCall::chunk_arrived(int rank, const wire::FrameHeader& header) {
  moved();
  receiver_of(header.part)->chunk_arrived(place_of(rank), header);
}

void ExchangeCall::results_ready(int rank, const wire::FrameHeader& header) {
  const std::size_t place = place_of(rank);
  if (!results_) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("lends results of {}, but that call has no results", describe()));
  }
  results_->ready(place, header);
}

void ExchangeCall::was_taken(int rank, std::uint8_t part) {
  const std::size_t place = place_of(rank);
  if (receiver_of(part) == nullptr) throw took_what_is_not_lent();
  if (part == 0) {
    peers_[place].sender.was_read();
    tell(place, wire::FrameKind::kKept, 0);
  } else {
    results_->was_read(place);
  }
  moved();
  settle();
}

void ExchangeCall::was_kept(int rank, std::uint8_t part) {
  const std::size_t place = place_of(rank);
  if (part == 0) {
    receiver_->was_kept(place);
  } else if (results_) {
    results_->was_final(place);
  }
  moved();
  settle();
}

void ExchangeCall::tell(std::size_t place, wire::FrameKind kind, std::uint8_t part) {
  auto header = wire::make_header(kind, transport_.rank(), key_, spec_);
  header.part = part;
  transport_.send_control(rank_at(place), header, {});
}

Error ExchangeCall::took_what_is_not_lent() const {
  return Error(ErrorCode::kUnavailable,
               fmt::format("says that it read memory which {} does not lend", describe()));
}

void ExchangeCall::run_job(const char* name, std::function<void()> work,
                           std::function<void()> then) {
  transport_.run_job(shared_from_this(), name, std::move(work), std::move(then));
}

wire::PayloadMark ExchangeCall::mark(std::uint64_t number, std::span<const std::byte> payload,
                                     std::size_t offset) const {
  return transport_.own_seal().mark(number, payload, key_, offset);
}

void ExchangeCall::verify(std::size_t place, std::span<const std::byte> payload,
                          const wire::FrameHeader& header) const {
  const wire::PayloadSeal& seal = transport_.seal_of(rank_at(place));
  if (seal.matches(header.payload, payload, key_, header.offset)) return;
  throw Error(
      ErrorCode::kDataLoss,
      fmt::format(
          "the bytes that rank {} sent in {} fail their checksum at offset {}: they were damaged "
          "on the way",
          rank_at(place), describe(), header.offset));
}

void ExchangeCall::read_from(std::size_t place, std::uint64_t address,
                             std::span<std::byte> into) const {
  try {
    read_memory(transport_.readable_process(rank_at(place)), address, into);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("rank {} {}", rank_at(place), error.what()));
  }
}

/// Returns whether nothing is on its way any more, in or out.
bool ExchangeCall::exchanged() const {
  for (std::size_t place = 0; place < size(); ++place) {
    if (place == own_) continue;
    if (!has_announced(place) || !peers_[place].sender.done()) return false;
  }
  return receiver_->done() && (!results_ || results_->done());
}

void ExchangeCall::job_ends() {
  --jobs_;
  settle();
}

void ExchangeCall::settle() {
  if (jobs_ > 0) return;
  switch (state_) {
    case State::kExchanging:
      if (results_) results_->send_finals();
      if (!exchanged()) return;
      if (!finish_) return end();
      state_ = State::kFinishing;
      return run_job("finish call", std::exchange(finish_, {}), [] {});
    case State::kFinishing:
    case State::kFailing: return end();
    case State::kEnded: return;
  }
}

void ExchangeCall::work_failed(const Error& error) {
  if (state_ != State::kFinishing) return;  // the transport has failed and fails the call
  state_ = State::kFailing;
  error_ = std::make_exception_ptr(error);
}

/// Fails the call. A call that is finishing ends well, because even a rank that stopped has sent
/// all its bytes for it.
void ExchangeCall::fail(std::exception_ptr error) {
  if (state_ != State::kExchanging) return;
  state_ = State::kFailing;
  error_ = std::move(error);
  settle();
}

void ExchangeCall::end() {
  state_ = State::kEnded;
  receiver_->end();
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
  for (std::size_t place = 0; place < size(); ++place) {
    const int rank = rank_at(place);
    if (!has_announced(place)) {
      absent.push_back(rank);
    } else if (place != own_ && (!peers_[place].sender.done() || lacks(rank, true))) {
      slow.push_back(rank);
    }
  }
  // If some ranks have not announced the call, only these are named: the others may be waiting for
  // them.
  const std::vector<int>& missing = absent.empty() ? slow : absent;
  return fmt::format("{} has waited {:.1f} s for rank{} {}", describe(),
                     seconds(transport_.reactor().clock().now() - begun_),
                     missing.size() == 1 ? "" : "s", fmt::join(missing, ", "));
}

}  // namespace ziggurat
