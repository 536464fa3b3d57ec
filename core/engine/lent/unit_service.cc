// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/unit_service.cc: sends and serves requests, and answers them.
#include "core/engine/lent/unit_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "core/engine/state/rank_messages.h"

namespace ziggurat {

/// The head of an answer. Messages follow if all is there.
struct UnitService::Answer {
  Came came = Came::kWhole;
  std::uint64_t refusal = 0;     ///< 0 if there is none; else 1 more than the refusal's ErrorCode
  std::array<char, 1000> why{};  ///< the words of the refusal, cut to fit, ending in a zero
};

UnitService::UnitService(CancelScope& cancel, Reactor& reactor, Communicator& ranks, Served served)
    : cancel_(cancel),
      reactor_(reactor),
      served_(std::move(served)),
      requests_(ranks.split(everyone(ranks))),
      answers_(ranks.split(everyone(ranks))),
      to_the_end_(reactor),
      begun_(cancel),
      given_(cancel),
      served_one_(reactor) {
  for (int rank = 0; rank < ranks.world_size(); ++rank)
    peers_.push_back(std::make_unique<Peer>(to_the_end_));
  requests_->on_send([this](int from) { hear(from); });
}

UnitService::~UnitService() { requests_->on_send({}); }

Task<UnitService::Came> UnitService::bring(int rank, Asked asked,
                                           std::span<const std::span<std::byte>> messages,
                                           const Landed& landed) {
  if (closing_ || peer(rank).closed) co_return Came::kClosed;
  Request request{.kind = Request::Kind::kUnit, .asked = asked};
  // From here to the send nothing may come between: answers come in the order of requests.
  const std::uint64_t number = peer(rank).asked++;
  Task<> sending = requests_->send(bytes_of_message(request), rank);
  Came came = Came::kWhole;
  std::exception_ptr error;
  try {
    co_await std::move(sending);
  } catch (...) {
    error = std::current_exception();
  }
  co_await peer(rank).asking.wait(number);
  try {
    if (!error) co_await receive(rank, messages, landed, came);
  } catch (...) {
    error = std::current_exception();
  }
  peer(rank).asking.next();
  if (error) std::rethrow_exception(error);
  co_return came;
}

Task<> UnitService::receive(int rank, std::span<const std::span<std::byte>> messages,
                            const Landed& landed, Came& came) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    Answer head;
    co_await answers_->recv(bytes_of_message(head), rank);
    if (head.refusal != 0) {
      throw Error(static_cast<ErrorCode>(head.refusal - 1),
                  fmt::format("rank {}: {}", rank, head.why.data()));
    }
    came = head.came;
    if (came != Came::kWhole) co_return;
    co_await answers_->recv(messages[i], rank);
    co_await landed(i);
  }
}

/// An engine that has failed answers nothing more: the other ranks have heard why.
void UnitService::hear(int from) {
  if (cancel_.cancelled() && !closing_) return;
  ++peer(from).coming;
  served_.spawn(serve(from, /*noticed=*/true));
}

/// Serves the next request of a rank. Whatever happens, those after it have their turns.
Task<> UnitService::serve(int from, bool noticed) {
  Peer& its = peer(from);
  const std::uint64_t number = its.heard++;
  ++serving_;
  Request request;
  std::exception_ptr error;
  try {
    co_await requests_->recv(bytes_of_message(request), from);
    if (request.kind == Request::Kind::kClosed) {
      its.closed = true;
      co_await send_request(from, {.kind = Request::Kind::kHeard});
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (noticed) --its.coming;
  if (request.kind == Request::Kind::kHeard) its.parted = true;
  served_one_.set();
  co_await its.answering.wait(number);
  try {
    if (!error && request.kind == Request::Kind::kUnit) co_await answer(from, request);
  } catch (...) {
    error = std::current_exception();
  }
  its.answering.next();
  --serving_;
  served_one_.set();
  if (error) std::rethrow_exception(error);
}

/// Waits until this rank has come to the generation: the one that asks is there already, and no
/// rank can go on to another without this one.
Task<> UnitService::answer(int from, const Request& request) {
  while (!closing_ && (!open_ || generation_ < request.asked.generation)) {
    begun_.reset();
    co_await begun_.wait();
  }
  if (closing_) {
    co_await say(from, Came::kClosed);
  } else if (changing_ || request.asked.generation < generation_) {
    co_await say(from, Came::kStale);
  } else {
    ++giving_;
    std::exception_ptr error;
    try {
      co_await give(from, request.asked);
    } catch (...) {
      error = std::current_exception();
    }
    --giving_;
    given_.set();
    if (error) std::rethrow_exception(error);
  }
}

Task<> UnitService::give(int from, const Asked& asked) {
  std::optional<Error> refused;
  Came came = Came::kWhole;
  const Give send = [this, from](std::span<const std::byte> message) -> Task<> {
    co_await say(from, Came::kWhole);
    co_await answers_->send(message, from);
  };
  try {
    came = co_await served_.slices(asked, send);
  } catch (const Error& error) {
    refused = error;
  }
  if (refused) {
    co_await refuse(from, *refused);
  } else if (came != Came::kWhole) {
    // This rank has asked the owner, unless it closes itself.
    co_await say(from, came == Came::kClosed && !closing_ ? Came::kOwnerClosed : came);
  }
}

Task<> UnitService::say(int from, Came came) {
  Answer head{.came = came};
  co_await answers_->send(bytes_of_message(head), from);
}

Task<> UnitService::refuse(int from, const Error& error) {
  Answer head{.refusal = 1 + static_cast<std::uint64_t>(error.code())};
  const std::string_view words = error.what();
  std::memcpy(head.why.data(), words.data(), std::min(words.size(), head.why.size() - 1));
  co_await answers_->send(bytes_of_message(head), from);
}

Task<> UnitService::send_request(int to, Request request) {
  co_await requests_->send(bytes_of_message(request), to);
}

Task<> UnitService::begin_changes() {
  changing_ = true;
  while (giving_ > 0) {
    given_.reset();
    co_await given_.wait();
  }
}

void UnitService::begin_generation(std::uint64_t generation) {
  generation_ = generation;
  open_ = true;
  changing_ = false;
  begun_.set();
}

Task<> UnitService::close() {
  closing_ = true;
  begun_.set();
  WorkGroup parting(reactor_);
  for (int rank = 0; rank < requests_->world_size(); ++rank)
    if (rank != requests_->rank()) parting.spawn(part(rank));
  co_await parting.wait_idle();
  while (serving_ > 0) {
    served_one_.reset();
    co_await served_one_.wait();
  }
  requests_->on_send({});
}

/// Tells a rank that this one closes, and serves it until it has heard it. A rank that has closed
/// before asks nothing any more.
Task<> UnitService::part(int other) {
  Peer& its = peer(other);
  if (its.closed) co_return;
  co_await send_request(other, {.kind = Request::Kind::kClosed});
  while (!its.parted) {
    if (its.coming > 0) {
      served_one_.reset();
      co_await served_one_.wait();
      continue;
    }
    // A call that waits for the rank, so that it is found out if that is gone.
    co_await serve(other, /*noticed=*/false);
  }
}

}  // namespace ziggurat
