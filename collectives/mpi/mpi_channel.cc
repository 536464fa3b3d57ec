// SPDX-License-Identifier: Apache-2.0
// collectives/mpi/mpi_channel.cc: converts frames to messages and back, between the reactor and the
// link.
#include "collectives/mpi/mpi_channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "collectives/exchange/peer_memory.h"
#include "collectives/random.h"

namespace ziggurat {

/// What the link's thread knows of the session. After the session has ended it reaches nobody.
class MpiSession::Listener final : public MpiListener {
 public:
  Listener(Reactor& reactor, std::weak_ptr<MpiSession> session)
      : reactor_(&reactor), session_(std::move(session)) {}

  void arrived(int from, bool bulk, MpiMessage message) override {
    tell([from, bulk, message = std::move(message)](MpiSession& session) {
      session.arrived(from, bulk, message);
    });
  }
  void failed(const std::string& why) override {
    tell([why](MpiSession& session) { session.failed(why); });
  }
  /// Runs `what` on the reactor's thread.
  void tell(std::function<void(MpiSession&)> what) {
    const std::lock_guard lock(mutex_);
    if (reactor_ == nullptr) return;
    reactor_->post([session = session_, what = std::move(what)] {
      if (const auto held = session.lock()) what(*held);
    });
  }
  void end() {
    const std::lock_guard lock(mutex_);
    reactor_ = nullptr;
  }

 private:
  std::mutex mutex_;  // held while posting, so that the reactor outlives the post
  Reactor* reactor_;
  std::weak_ptr<MpiSession> session_;
};

MpiSession::MpiSession(Reactor& reactor, std::shared_ptr<MpiLink> link, int control_tag)
    : reactor_(reactor),
      link_(std::move(link)),
      control_tag_(control_tag),
      channels_(2 * static_cast<std::size_t>(link_->world_size())) {}

MpiSession::~MpiSession() {
  if (!listener_) return;
  listener_->end();
  link_->stop_listening(control_tag_);
}

void MpiSession::listen() {
  if (listener_) return;
  listener_ = std::make_shared<Listener>(reactor_, weak_from_this());
  link_->listen(control_tag_, listener_);
}

std::shared_ptr<MpiChannel> MpiSession::add_channel(int peer, bool bulk, std::uint64_t epoch) {
  auto channel = std::make_shared<MpiChannel>(shared_from_this(), peer, bulk, epoch);
  channel_of(peer, bulk) = channel;
  return channel;
}

void MpiSession::pump(MpiChannel& channel) {
  while (!channel.queue_.empty()) {
    if (channel.bulk_ && bulk_sends_ == kBulkSends) {
      waiting_.push_back(channel.weak_from_this());
      return;
    }
    const Channel::Outgoing frame = std::move(channel.queue_.front());
    channel.queue_.pop_front();
    const std::span<const std::byte> payload = frame.bytes();
    MpiMessage message;
    message.size = sizeof(frame.header) + payload.size();
    message.bytes = std::shared_ptr<std::byte[]>(new std::byte[message.size]);
    std::memcpy(message.bytes.get(), &frame.header, sizeof(frame.header));
    copy_bytes(payload, {message.bytes.get() + sizeof(frame.header), payload.size()});
    bulk_sends_ += channel.bulk_ ? 1 : 0;
    ++channel.in_flight_;
    // The callback holds neither session nor channel: otherwise the link would be destroyed on its
    // own thread with the last of them.
    link_->send(channel.peer_, control_tag_ + (channel.bulk_ ? 1 : 0), std::move(message),
                [listener = listener_, peer = channel.peer_, bulk = channel.bulk_,
                 written = frame.written]() {
                  listener->tell([=](MpiSession& session) { session.sent(peer, bulk, written); });
                });
  }
}

void MpiSession::sent(int peer, bool bulk, const std::function<void()>& written) {
  if (const auto channel = channel_of(peer, bulk).lock()) {
    --channel->in_flight_;
    if (written && channel->events_ != nullptr) written();
  }
  if (!bulk) return;
  --bulk_sends_;
  for (auto waiting = std::exchange(waiting_, {}); !waiting.empty(); waiting.pop_front()) {
    if (const auto next = waiting.front().lock()) pump(*next);
  }
}

void MpiSession::arrived(int from, bool bulk, const MpiMessage& message) {
  const auto channel = channel_of(from, bulk).lock();
  if (channel) channel->deliver({message.bytes.get(), message.size});
}

void MpiSession::failed(const std::string& why) {
  for (const auto& weak : channels_) {
    const auto channel = weak.lock();
    if (!channel || channel->events_ == nullptr) continue;
    std::exchange(channel->events_, nullptr)
        ->disconnected(channel->peer_, *channel, "is out of reach: " + why);
  }
}

MpiChannel::MpiChannel(std::shared_ptr<MpiSession> session, int peer, bool bulk,
                       std::uint64_t epoch)
    : session_(std::move(session)), peer_(peer), bulk_(bulk), seal_(epoch) {}

void MpiChannel::start(Events& events) {
  events_ = &events;
  session_->listen();
}

void MpiChannel::send(Outgoing frame) {
  if (events_ == nullptr) return;
  seal_.seal(frame.header);
  queue_.push_back(std::move(frame));
  if (queue_.size() == 1) session_->pump(*this);
}

void MpiChannel::close() noexcept {
  events_ = nullptr;
  queue_.clear();
  session_->in_trouble();
}

void MpiChannel::deliver(std::span<const std::byte> message) {
  if (events_ == nullptr) return;
  const auto held = shared_from_this();
  std::string fault;
  try {
    wire::FrameHeader header;
    if (message.size() < sizeof(header)) {
      throw Error(ErrorCode::kUnavailable, "sent a message that is shorter than a frame");
    }
    std::memcpy(&header, message.data(), sizeof(header));
    const auto payload = message.subspan(sizeof(header));
    seal_.check(header);
    if (payload.size() != header.length) {
      throw Error(ErrorCode::kUnavailable,
                  fmt::format("sent {} bytes of payload in a frame whose header says {}",
                              payload.size(), header.length));
    }
    const std::span<std::byte> place = events_->landing(peer_, header);
    copy_bytes(payload, place);
    events_->arrived(peer_, header, place);
  } catch (const Error& error) {
    fault = error.what();
  }
  if (!fault.empty() && events_ != nullptr) {
    std::exchange(events_, nullptr)->bad_frame(peer_, fault);
  }
}

namespace {

constexpr std::size_t kHostBytes = 240;

/// The first message of each rank to all others.
struct Greeting {
  std::uint64_t epoch = 0;
  std::array<char, kHostBytes> host{};
};

void require_agreement(const MpiLink& link, const RankOptions& options) {
  if (link.rank() == options.rank && link.world_size() == options.world_size) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} says that this is rank {} of {}, but MPI ({}) says that it is rank "
                          "{} of {}: start the ranks with the launcher of that MPI",
                          options.source, options.rank, options.world_size, link.description(),
                          link.rank(), link.world_size()));
}

}  // namespace

ExchangeOptions over_mpi(Reactor& reactor, const std::shared_ptr<MpiLink>& link,
                         const RankOptions& options) {
  require_agreement(*link, options);
  const auto session = std::make_shared<MpiSession>(reactor, link, link->next_tags());
  Greeting own{.epoch = random_number() | 1, .host = {}};
  const std::string host = this_host();
  std::copy_n(host.begin(), std::min(host.size(), kHostBytes), own.host.begin());
  const std::vector<std::byte> all =
      link->gather(std::as_bytes(std::span(&own, 1)), options.connect_timeout);
  std::vector<Greeting> ranks(static_cast<std::size_t>(link->world_size()));
  std::memcpy(ranks.data(), all.data(), all.size());

  ExchangeOptions exchange;
  exchange.rank = link->rank();
  exchange.carrier = "messages of " + link->description();
  exchange.timeout = options.call_timeout;
  for (int peer = 0; peer < link->world_size(); ++peer) {
    const auto& at = ranks[static_cast<std::size_t>(peer)].host;
    ExchangePeer row;
    row.host = std::string(at.data(), at.size());
    if (peer != link->rank()) {
      row.control = session->add_channel(peer, false, ranks[0].epoch);
      row.bulk = session->add_channel(peer, true, ranks[0].epoch);
    }
    exchange.peers.push_back(std::move(row));
  }
  return exchange;
}

}  // namespace ziggurat
