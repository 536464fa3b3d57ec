// SPDX-License-Identifier: Apache-2.0
// collectives/exchange/exchange_transport.cc: numbers and begins calls, sends frames, and fails all
// calls together.
#include "collectives/exchange/exchange_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/log.h"
#include "base/runtime/work_ended.h"
#include "collectives/exchange/exchange_call.h"

namespace ziggurat {
namespace {

using wire::CallKey;
using wire::FrameHeader;
using wire::FrameKind;

constexpr std::size_t kBuffersKept = 64;  // of wire::kChunkBytes
constexpr std::size_t kRecordMax = 64;    // calls
constexpr std::size_t kPendingInText = 4;

Task<> failing(Error error) {
  throw error;
  co_return;
}

}  // namespace

std::shared_ptr<ExchangeTransport> ExchangeTransport::create(Reactor& reactor, WorkerPool& workers,
                                                             ExchangeOptions options) {
  auto transport = std::make_shared<ExchangeTransport>(reactor, workers, std::move(options));
  if (reactor.on_reactor_thread()) {
    transport->start();
  } else {
    const auto start = [](ExchangeTransport& it) -> Task<> {
      it.start();
      co_return;
    };
    reactor.block_on(start(*transport));
  }
  ExchangeTransport* const itself = transport.get();
  return {itself, [transport](ExchangeTransport*) {
            if (transport->reactor_.on_reactor_thread()) {
              transport->close();
            } else {
              transport->reactor_.block_on(close_and_flush(transport));
            }
          }};
}

ExchangeTransport::ExchangeTransport(Reactor& reactor, WorkerPool& workers, ExchangeOptions options)
    : reactor_(reactor),
      workers_(workers),
      rank_(options.rank),
      carrier_(std::move(options.carrier)),
      readable_(std::move(options.readable)),
      patience_(options.peers.size(), options.timeout),
      peers_(options.peers.size()) {
  patience_.left(static_cast<std::size_t>(rank_));
  const std::string& own_host = options.peers[static_cast<std::size_t>(rank_)].host;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    ExchangePeer& from = options.peers[i];
    peers_[i].payloads = from.payloads;
    if (static_cast<int>(i) == rank_) continue;
    peers_[i].control = std::move(from.control);
    peers_[i].bulk = std::move(from.bulk);
    peers_[i].same_host = from.host == own_host;
    if (peers_[i].same_host && from.memory.process != 0) {
      const std::string why_not = why_not_readable(from.memory);
      if (why_not.empty()) peers_[i].process = from.memory.process;
      if (!why_not.empty()) {
        note_degraded("ranks", fmt::format("ranks of this host cannot read each other's memory, so "
                                           "they send bytes instead, which is "
                                           "slower (rank {}: {})",
                                           i, why_not));
      }
    }
    peers_[i].small.resize(wire::kEagerBytes);
  }
  traffic_.waited.resize(peers_.size());
}

ExchangeTransport::~ExchangeTransport() {
  // After a failure or close() the channels were finished on the reactor, where their last reads
  // may still be ending, while this may be another thread.
  if (failed()) return;
  for (Peer& peer : peers_) {
    if (!peer.control) continue;
    peer.control->finish();
    peer.bulk->finish();
  }
}

void ExchangeTransport::start() {
  for (Peer& peer : peers_) {
    if (!peer.control) continue;
    peer.control->start(*this);
    peer.bulk->start(*this);
  }
}

bool ExchangeTransport::on_one_host() const noexcept {
  return std::ranges::all_of(peers_,
                             [](const Peer& other) { return !other.control || other.same_host; });
}

std::string ExchangeTransport::description() const {
  const auto read = static_cast<std::size_t>(
      std::ranges::count_if(peers_, [](const Peer& other) { return other.process != 0; }));
  if (read == 0) return carrier_;
  if (read + 1 == peers_.size()) return "each other's memory, announced over " + carrier_;
  return "each other's memory within a host, " + carrier_;
}

void ExchangeTransport::say_goodbye() {
  if (!std::ranges::all_of(calls_,
                           [&](const auto& call) { return outlasts(call.first.communicator); })) {
    fail(ErrorCode::kCancelled, "this rank's communicators were closed while calls were under way");
  }
  if (failed() || std::exchange(said_goodbye_, true)) return;
  for (Peer& peer : peers_) {
    if (!peer.control) continue;
    peer.control->send({wire::make_header(FrameKind::kBye, rank_, {}, {}), {}, {}, {}});
  }
}

Task<bool> ExchangeTransport::part(std::shared_ptr<ExchangeTransport> self, Nanoseconds most) {
  self->say_goodbye();
  Clock& clock = self->reactor_.clock();
  const Nanoseconds give_up = clock.now() + most;
  for (;;) {
    if (self->failed()) co_return false;
    if (std::ranges::all_of(self->peers_,
                            [](const Peer& peer) { return !peer.control || peer.left; })) {
      co_return true;
    }
    if (clock.now() >= give_up) co_return false;
    const auto turn = std::make_shared<Signal>(self->reactor_);
    clock.after(std::chrono::milliseconds(1), [turn] { turn->set(); });
    co_await turn->wait();
  }
}

void ExchangeTransport::close() {
  say_goodbye();
  if (failed()) return;
  for (Peer& peer : peers_) {
    if (!peer.control) continue;
    peer.control->finish();
    peer.bulk->finish();
  }
  failure_ = Error(ErrorCode::kCancelled, "the communicator is closed");
}

Task<> ExchangeTransport::close_and_flush(std::shared_ptr<ExchangeTransport> self) {
  self->close();
  const auto flushed = [&] {
    return std::ranges::all_of(
        self->peers_, [](const Peer& peer) { return !peer.control || peer.control->flushed(); });
  };
  Clock& clock = self->reactor_.clock();
  const Nanoseconds give_up = clock.now() + kLastWords;
  while (!flushed() && clock.now() < give_up) {
    const auto turn = std::make_shared<Signal>(self->reactor_);
    clock.after(std::chrono::milliseconds(1), [turn] { turn->set(); });
    co_await turn->wait();
  }
}

// Starts the timer. There is none while there is no call, so that a reactor can see that nothing
// else is to come. A rank without calls still answers the ranks that have some.
void ExchangeTransport::watch() {
  if (watching_ || calls_.empty()) return;
  watching_ = true;
  patience_.begin(reactor_.clock().now());
  tick_later();
}

void ExchangeTransport::tick_later() {
  reactor_.clock().after(patience_.period(), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || self->failed()) return;
    self->watching_ = !self->calls_.empty();
    if (self->watching_) self->tick();
  });
}

void ExchangeTransport::tick() {
  patience_.tick(reactor_.clock().now(), work_ended_count(reactor_));
  if (const auto verdict = patience_.verdict()) return fail(ErrorCode::kDeadlineExceeded, *verdict);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].control || peers_[i].left) continue;
    send_control(static_cast<int>(i), wire::make_header(FrameKind::kAsk, rank_, {}, {}), {});
  }
  tick_later();
}

void ExchangeTransport::alive(int from, const FrameHeader& header) {
  if (header.kind == FrameKind::kAlive)
    return patience_.answered(static_cast<std::size_t>(from), header.count);
  auto answer = wire::make_header(FrameKind::kAlive, rank_, {}, {});
  answer.count = work_ended_count(reactor_);
  send_control(from, answer, {});
}

Task<> ExchangeTransport::issue(std::uint64_t communicator, std::uint64_t lane,
                                const CallSpec& spec,
                                std::shared_ptr<const std::vector<int>> members,
                                ExchangePlan plan) {
  for (const int member : *members) {
    if (!failed() && peer(member).left && !outlasts(communicator)) {
      fail(ErrorCode::kUnavailable,
           fmt::format("rank {} has left and closed its communicators, but rank {} still calls {}",
                       member, rank_, describe(spec)));
    }
  }
  if (failed()) {
    return failing(Error(failure_->code(), fmt::format("{}; rank {} called {} after that",
                                                       failure_->what(), rank_, describe(spec))));
  }
  const CallKey key{communicator, next_sequence_[{communicator, lane}]++, lane};
  record_.push_back({spec, key.sequence, members});
  if (record_.size() > kRecordMax) record_.pop_front();
  const auto call =
      std::make_shared<ExchangeCall>(*this, key, spec, std::move(members), std::move(plan));
  calls_.emplace(key, call);
  watch();
  reactor_.external_begin();
  Task<> ended = ExchangeCall::wait(call);
  call->begin();
  if (const auto early = early_.find(key); early != early_.end()) {
    const std::vector<Early> frames = std::move(early->second);
    early_.erase(early);
    early_count_ -= frames.size();
    for (const Early& frame : frames) {
      const int from = static_cast<int>(frame.header.from);
      try {
        if (!failed()) call->announced(from, frame.header, frame.payload);
      } catch (const Error& error) {
        bad_frame(from, error.what());
      }
    }
  }
  return ended;
}

void ExchangeTransport::ended(ExchangeCall& call) {
  reactor_.external_end();
  calls_.erase(call.key());
}

std::string ExchangeTransport::with_pending(const std::string& text) const {
  std::string all = text;
  std::size_t named = 0;
  for (const auto& [key, call] : calls_) {
    if (++named > kPendingInText) {
      all += fmt::format("; and {} calls more", calls_.size() - kPendingInText);
      break;
    }
    all += fmt::format("; on rank {} {}", rank_, call->waiting());
  }
  return all;
}

void ExchangeTransport::fail(ErrorCode code, const std::string& text) {
  if (!failed()) stop(code, text);
}

void ExchangeTransport::stop(ErrorCode code, const std::string& text) {
  const std::string full = with_pending(text);
  failure_ = Error(code, full);
  std::vector<std::string> last;
  for (const CallName& call : record_)
    last.push_back(describe(call.spec, call.sequence, *call.members));
  log().info("rank {} stops: {}; its last calls, oldest first: {}", rank_, full,
             fmt::join(last, "; "));
  std::string told = full.substr(0, wire::kReasonBytes);
  const auto bytes = std::as_bytes(std::span(told));
  for (Peer& peer : peers_) {
    if (!peer.control) continue;
    peer.bulk->close();
    auto header = wire::make_header(FrameKind::kAbort, rank_, {}, {});
    header.code = static_cast<std::uint16_t>(code);
    header.length = bytes.size();
    header.payload = own_seal().mark(next_payload(), bytes, {}, 0);
    peer.control->send({header, {}, {bytes.begin(), bytes.end()}, {}});
    peer.control->finish();
  }
  early_.clear();
  for (const auto& hear : hear_failure_) hear();
  const auto calls = calls_;
  const std::exception_ptr failure = std::make_exception_ptr(*failure_);
  for (const auto& [key, call] : calls) call->fail(failure);
}

Traffic::Sent& ExchangeTransport::sent_to(int rank) noexcept {
  return peer(rank).same_host ? traffic_.same_host : traffic_.other_hosts;
}

void ExchangeTransport::send_control(int to, FrameHeader header,
                                     std::span<const std::byte> payload) {
  Traffic::Sent& sent = sent_to(to);
  sent.payload_bytes += payload.size();
  sent.frame_bytes += sizeof(FrameHeader);
  peer(to).control->send({header, {}, {payload.begin(), payload.end()}, {}});
}

void ExchangeTransport::send_bulk(int to, FrameHeader header, std::span<const std::byte> payload,
                                  std::function<void()> written) {
  Traffic::Sent& sent = sent_to(to);
  sent.payload_bytes += payload.size();
  sent.frame_bytes += sizeof(FrameHeader);
  peer(to).bulk->send({header, payload, {}, std::move(written)});
}

void ExchangeTransport::run_job(const std::shared_ptr<ExchangeCall>& call, const char* name,
                                std::function<void()> work, std::function<void()> then) {
  call->job_begins();
  auto self = shared_from_this();
  workers_.submit(name, [self = std::move(self), call = call, work = std::move(work),
                         then = std::move(then)]() mutable {
    std::optional<Error> fault;
    try {
      work();
    } catch (const Error& error) {
      fault = error;
    }
    // Everything that the worker holds moves back to the reactor's thread, so that it is destroyed
    // there.
    Reactor& reactor = self->reactor_;
    reactor.post([self = std::move(self), call = std::move(call), work = std::move(work),
                  fault = std::move(fault), then = std::move(then)] {
      if (fault) call->work_failed(*fault);
      if (fault && fault->code() == ErrorCode::kDataLoss) {
        self->fail(ErrorCode::kUnavailable, fault->what());
      } else if (fault) {
        self->fail_after_last_words(fault->what());
      } else if (!self->failed()) {
        then();
      }
      call->job_ends();
    });
  });
}

std::unique_ptr<std::byte[]> ExchangeTransport::take_buffer() {
  if (buffers_.empty()) return std::unique_ptr<std::byte[]>(new std::byte[wire::kChunkBytes]);
  auto buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void ExchangeTransport::return_buffer(std::unique_ptr<std::byte[]> buffer) {
  if (buffers_.size() < kBuffersKept) buffers_.push_back(std::move(buffer));
}

}  // namespace ziggurat
