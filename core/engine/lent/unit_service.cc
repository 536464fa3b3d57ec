// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/unit_service.cc: sends and serves requests, and answers them.
#include "core/engine/lent/unit_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

namespace ziggurat {
namespace {

std::vector<int> everyone(const Communicator& ranks) {
  std::vector<int> all(static_cast<std::size_t>(ranks.world_size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

template <class Message>
std::span<std::byte> bytes_of(Message& message) {
  return std::as_writable_bytes(std::span(&message, 1));
}

}  // namespace

/// The head of an answer. Messages follow if all is there.
struct UnitService::Answer {
  Came came = Came::kWhole;
  std::uint64_t refusal = 0;     ///< 0 if there is none; else 1 more than the refusal's ErrorCode
  std::array<char, 1000> why{};  ///< the words of the refusal, cut to fit, ending in a zero
};

UnitService::UnitService(Context& context, Communicator& ranks, Served served)
    : context_(context),
      served_(std::move(served)),
      requests_(ranks.split(everyone(ranks))),
      answers_(ranks.split(everyone(ranks))),
      begun_(context.cancel),
      given_(context.cancel) {
  for (int rank = 0; rank < ranks.world_size(); ++rank)
    peers_.push_back(std::make_unique<Peer>(context.cancel));
  requests_->on_send([this](int from) { hear(from); });
}

UnitService::~UnitService() { requests_->on_send({}); }

Task<UnitService::Came> UnitService::bring(int rank, StreamedUnit unit, std::uint64_t generation,
                                           std::span<const std::span<std::byte>> messages) {
  if (co_await served_.closed(rank)) co_return Came::kClosed;
  Request request{.unit = unit, .generation = generation};
  // From here to the send nothing may come between: answers come in the order of requests.
  const std::uint64_t number = peer(rank).asked++;
  Task<> sending = requests_->send(bytes_of(request), rank);
  co_await std::move(sending);
  co_await peer(rank).asking.wait(number);
  Came came = Came::kWhole;
  std::exception_ptr error;
  try {
    co_await receive(rank, messages, came);
  } catch (...) {
    error = std::current_exception();
  }
  peer(rank).asking.next();
  if (error) std::rethrow_exception(error);
  co_return came;
}

Task<> UnitService::receive(int rank, std::span<const std::span<std::byte>> messages, Came& came) {
  Answer head;
  co_await answers_->recv(bytes_of(head), rank);
  if (head.refusal != 0) {
    throw Error(static_cast<ErrorCode>(head.refusal - 1),
                fmt::format("rank {}: {}", rank, head.why.data()));
  }
  came = head.came;
  if (came != Came::kWhole) co_return;
  for (const std::span<std::byte> message : messages) co_await answers_->recv(message, rank);
}

void UnitService::hear(int from) { context_.spawn_local(serve(from, peer(from).heard++)); }

Task<> UnitService::serve(int from, std::uint64_t number) {
  Request request;
  co_await requests_->recv(bytes_of(request), from);
  co_await peer(from).answering.wait(number);
  co_await answer(from, request);
  peer(from).answering.next();
}

/// Waits until this rank has come to the generation: the one that asks is there already, and no
/// rank can go on to another without this one.
Task<> UnitService::answer(int from, const Request& request) {
  while (!closing_ && (!open_ || generation_ < request.generation)) {
    begun_.reset();
    co_await begun_.wait();
  }
  if (closing_) {
    co_await say(from, Came::kClosed);
  } else if (changing_ || request.generation < generation_) {
    co_await say(from, Came::kStale);
  } else {
    ++giving_;
    std::exception_ptr error;
    try {
      co_await give(from, request);
    } catch (...) {
      error = std::current_exception();
    }
    --giving_;
    given_.set();
    if (error) std::rethrow_exception(error);
  }
}

Task<> UnitService::give(int from, const Request& request) {
  std::optional<Error> refused;
  Slices slices;
  try {
    slices = co_await served_.slices(static_cast<StreamedUnit>(request.unit));
  } catch (const Error& error) {
    refused = error;
  }
  if (refused) {
    co_await refuse(from, *refused);
  } else {
    co_await send(from, slices);
  }
}

Task<> UnitService::send(int from, const Slices& slices) {
  co_await say(from, Came::kWhole);
  for (const std::span<const std::byte> message : slices.messages)
    co_await answers_->send(message, from);
}

Task<> UnitService::say(int from, Came came) {
  Answer head{.came = came};
  co_await answers_->send(bytes_of(head), from);
}

Task<> UnitService::refuse(int from, const Error& error) {
  Answer head{.refusal = 1 + static_cast<std::uint64_t>(error.code())};
  const std::string_view words = error.what();
  std::memcpy(head.why.data(), words.data(), std::min(words.size(), head.why.size() - 1));
  co_await answers_->send(bytes_of(head), from);
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

void UnitService::close() {
  closing_ = true;
  begun_.set();
}

}  // namespace ziggurat
