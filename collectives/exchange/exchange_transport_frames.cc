// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_transport_frames.cc: gives frames that come in to their calls, and
// handles the end of a connection.
#include <fmt/format.h>

#include "collectives/exchange/exchange_call.h"
#include "collectives/exchange/exchange_transport.h"

namespace ziggurat {

using wire::CallKey;
using wire::FrameHeader;
using wire::FrameKind;

namespace {

constexpr std::size_t kEarlyMax = 65'536;  // the most announcements of calls that this rank has not
                                           // made yet

}  // namespace

std::span<std::byte> ExchangeTransport::landing(int from, const FrameHeader& header) {
  if (header.from != static_cast<std::uint32_t>(from)) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("sent a frame that names rank {} as its sender", header.from));
  }
  if (header.kind == FrameKind::kChunk) {
    const auto call = calls_.find(header.key());
    if (call == calls_.end()) {
      throw Error(ErrorCode::kUnavailable,
                  "sent data for a call that this rank has not begun or has ended: the ranks' "
                  "calls are out of order");
    }
    return call->second->landing(from, header);
  }
  std::vector<std::byte>& small = peer(from).small;
  if (header.length > small.size()) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("sent a control frame of {} bytes, but the limit is {}", header.length,
                            small.size()));
  }
  return std::span(small).first(header.length);
}

void ExchangeTransport::arrived(int from, const FrameHeader& header, std::span<std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kCall: return announced(from, header, payload);
    case FrameKind::kChunk: return calls_.at(header.key())->chunk_arrived(from, header);
    case FrameKind::kReady:
    case FrameKind::kTaken:
    case FrameKind::kKept: return about_memory(from, header);
    case FrameKind::kAsk:
    case FrameKind::kAlive: return alive(from, header);
    case FrameKind::kAbort: return peer_aborted(from, header, payload);
    case FrameKind::kBye:
      peer(from).left = true;
      patience_.left(static_cast<std::size_t>(from));
      for (const auto& [key, call] : calls_) {
        if (!outlasts(key.communicator) && call->lacks(from, false)) {
          return fail_calls_without(from);
        }
      }
      return;
  }
  throw Error(ErrorCode::kUnavailable,
              fmt::format("sent a frame of unknown kind {}", static_cast<int>(header.kind)));
}

void ExchangeTransport::announced(int from, const FrameHeader& header,
                                  std::span<std::byte> payload) {
  const CallKey key = header.key();
  if (const auto call = calls_.find(key); call != calls_.end()) {
    const std::shared_ptr<ExchangeCall> held = call->second;
    held->announced(from, header, payload);
    return;
  }
  const auto next = next_sequence_.find({key.communicator, key.lane});
  if (next != next_sequence_.end() && key.sequence < next->second) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("announced call {} again, although that call has ended", key.sequence));
  }
  if (early_count_ == kEarlyMax) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("announced {} calls that rank {} has not made yet, which is the limit: the "
                    "ranks run too far apart",
                    kEarlyMax, rank_));
  }
  ++early_count_;
  early_[key].push_back({header, {payload.begin(), payload.end()}});
  if (header.call != CallKind::kSend) return;
  if (const auto hears = hear_sends_.find(key.communicator); hears != hear_sends_.end())
    hears->second(key.lane);
}

void ExchangeTransport::on_send(std::uint64_t communicator,
                                std::function<void(std::uint64_t lane)> hear) {
  if (!hear) {
    hear_sends_.erase(communicator);
    return;
  }
  hear_sends_[communicator] = hear;
  std::vector<std::uint64_t> lanes;  // copied first, because a call that `hear` makes removes its
                                     // frame
  for (const auto& [key, frames] : early_) {
    if (key.communicator == communicator && frames.front().header.call == CallKind::kSend)
      lanes.push_back(key.lane);
  }
  for (const std::uint64_t lane : lanes) hear(lane);
}

void ExchangeTransport::about_memory(int from, const FrameHeader& header) {
  const auto found = calls_.find(header.key());
  if (found == calls_.end()) {
    throw Error(ErrorCode::kUnavailable,
                "sent a frame for a call that this rank has not begun or has ended: the ranks' "
                "calls are out of order");
  }
  const std::shared_ptr<ExchangeCall> call = found->second;
  if (header.kind == FrameKind::kReady) return call->results_ready(from, header);
  if (header.kind == FrameKind::kTaken) return call->was_taken(from, header.part);
  call->was_kept(from, header.part);
}

void ExchangeTransport::peer_aborted(int from, const FrameHeader& header,
                                     std::span<std::byte> payload) {
  if (!seal_of(from).matches(header.payload, payload, {}, 0) ||
      header.code > static_cast<std::uint16_t>(ErrorCode::kUnimplemented)) {
    throw Error(ErrorCode::kUnavailable, "stopped, but its reason was damaged on the way");
  }
  const std::string_view reason(reinterpret_cast<const char*>(payload.data()), payload.size());
  fail(static_cast<ErrorCode>(header.code), fmt::format("rank {} stopped: {}", from, reason));
}

void ExchangeTransport::fail_calls_without(int peer) {
  fail(ErrorCode::kUnavailable,
       fmt::format(
           "rank {} has left and closed its communicators while other ranks still make calls",
           peer));
}

void ExchangeTransport::bad_frame(int from, const std::string& how) {
  fail(ErrorCode::kUnavailable, fmt::format("rank {} {}", from, how));
}

/// Fails after a short wait: a peer that broke off sends its reason on the control channel, if it
/// can, and that frame may come a little later.
void ExchangeTransport::fail_after_last_words(const std::string& text) {
  reactor_.clock().after(kLastWords, [weak = weak_from_this(), text] {
    if (const auto self = weak.lock()) self->fail(ErrorCode::kUnavailable, text);
  });
}

void ExchangeTransport::disconnected(int from, const Channel& channel, const std::string& how) {
  if (failed()) return;
  const std::string text = fmt::format("rank {} {}", from, how);
  if (&channel == peer(from).control.get()) {
    if (!peer(from).left) fail(ErrorCode::kUnavailable, text);
    return;
  }
  // The peer's goodbye comes on the control channel too, and may be read later.
  reactor_.clock().after(kLastWords, [weak = weak_from_this(), from, text] {
    const auto self = weak.lock();
    if (!self || self->failed()) return;
    if (!self->peer(from).left) return self->fail(ErrorCode::kUnavailable, text);
    for (const auto& [key, call] : self->calls_) {
      if (call->lacks(from, true)) return self->fail_calls_without(from);
    }
  });
}

}  // namespace ziggurat
