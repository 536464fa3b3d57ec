// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_service.cc: sends and serves requests, and answers them.
#include "core/engine/state/state_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "core/engine/state/rank_messages.h"

namespace ziggurat {
namespace {

/// Packs pieces one after another, each as the length of its name, its count and its name.
std::vector<std::byte> packed(const std::vector<RankPiece>& pieces) {
  std::vector<std::byte> bytes;
  const auto append = [&](const void* from, std::size_t size_bytes) {
    const auto* const first = static_cast<const std::byte*>(from);
    bytes.insert(bytes.end(), first, first + size_bytes);
  };
  for (const RankPiece& piece : pieces) {
    const std::array<std::uint64_t, 2> head{piece.name.size(), piece.count};
    append(head.data(), sizeof(head));
    append(piece.name.data(), piece.name.size());
  }
  return bytes;
}

std::vector<RankPiece> unpacked(std::span<const std::byte> bytes) {
  std::vector<RankPiece> pieces;
  while (!bytes.empty()) {
    std::array<std::uint64_t, 2> head{};
    std::memcpy(head.data(), bytes.data(), sizeof(head));
    bytes = bytes.subspan(sizeof(head));
    const auto* const name = reinterpret_cast<const char*>(bytes.data());
    pieces.push_back({.name = std::string(name, head[0]), .count = head[1]});
    bytes = bytes.subspan(head[0]);
  }
  return pieces;
}

}  // namespace

struct StateService::Request {
  enum class Kind : std::uint64_t { kRead, kClosed };
  Kind kind = Kind::kRead;
  std::uint64_t piece = 0;
  std::uint64_t state = 0;
  std::uint64_t generation = 0;
  Begun begun{};  ///< for kClosed
};

/// The head of an answer, which is followed by `count` values, or by none if it is a refusal.
struct StateService::Answer {
  std::uint64_t count = 0;
  std::uint64_t refusal = 0;     ///< 0 if there is none; else 1 more than the refusal's ErrorCode
  std::array<char, 1008> why{};  ///< the words of the refusal, cut to fit, ending in a zero
};

StateService::StateService(CancelScope& cancel, Reactor& reactor, Communicator& ranks,
                           Served served)
    : served_(std::move(served)),
      requests_(ranks.split(everyone(ranks))),
      answers_(ranks.split(everyone(ranks))),
      serving_(reactor),
      made_(cancel) {
  for (int rank = 0; rank < ranks.world_size(); ++rank)
    peers_.push_back(std::make_unique<Peer>(reactor));
  // From here on, since ranks whose opening fails tell each other that they close.
  requests_->on_send([this](int from) { hear(from); });
}

/// Exchanges the pieces. Their texts have different lengths, so all are sent with the length of the
/// longest.
Task<> StateService::open() {
  std::vector<std::byte> own = packed(served_.pieces);
  const std::array<std::uint64_t, 1> size{own.size()};
  std::vector<std::uint64_t> sizes(peers_.size());
  co_await requests_->all_gather(std::as_bytes(std::span(size)),
                                 std::as_writable_bytes(std::span(sizes)));
  const std::uint64_t longest = *std::ranges::max_element(sizes);
  own.resize(longest);
  std::vector<std::byte> all(longest * peers_.size());
  co_await requests_->all_gather(own, all);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank)
    peers_[rank]->pieces = unpacked(std::span(all).subspan(rank * longest, sizes[rank]));
}

const std::vector<RankPiece>& StateService::pieces_of(int rank) const {
  if (rank < 0 || static_cast<std::size_t>(rank) >= peers_.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("there is no rank {} among {} ranks: give 0 to {}", rank, peers_.size(),
                            peers_.size() - 1));
  }
  return peers_[static_cast<std::size_t>(rank)]->pieces;
}

Task<> StateService::read(int rank, std::uint64_t piece, std::uint64_t state,
                          std::uint64_t generation, std::span<float> values) {
  co_await until_heard(peer(rank));
  if (peer(rank).closed) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("rank {} has closed its engine, so its pieces cannot be read any more: "
                            "read them before the rank closes its engine",
                            rank));
  }
  Request request{.piece = piece, .state = state, .generation = generation};
  co_await requests_->send(bytes_of_message(request), rank);
  for (std::span<float> left = values; !left.empty();) {
    Answer head;
    co_await answers_->recv(bytes_of_message(head), rank);
    if (head.refusal != 0) {
      throw Error(static_cast<ErrorCode>(head.refusal - 1),
                  fmt::format("rank {}: {}", rank, head.why.data()));
    }
    const std::span<float> next = left.first(std::min<std::uint64_t>(head.count, left.size()));
    co_await answers_->recv(std::as_writable_bytes(next), rank);
    left = left.subspan(next.size());
  }
}

void StateService::made(std::uint64_t generation) {
  generation_ = generation;
  made_.set();
}

int StateService::closed_rank() const {
  const auto found = std::ranges::find_if(peers_, [](const auto& its) { return its->closed; });
  return found == peers_.end() ? -1 : static_cast<int>(found - peers_.begin());
}

/// Receives a request at once, so that a coroutine that waits for `heard` knows everything that was
/// sent before.
void StateService::hear(int from) {
  Peer& its = peer(from);
  if (its.coming++ == 0) its.heard.reset();
  serving_.spawn(serve(from));
}

Task<> StateService::serve(int from) {
  Request request;
  std::exception_ptr lost;
  try {
    co_await requests_->recv(bytes_of_message(request), from);
  } catch (...) {
    lost = std::current_exception();
  }
  Peer& its = peer(from);
  if (!lost && request.kind == Request::Kind::kClosed) its.closed = true;
  if (--its.coming == 0) its.heard.set();
  if (lost) std::rethrow_exception(lost);
  if (request.kind == Request::Kind::kClosed) {
    served_.closed(from, request.begun);
  } else {
    co_await answer(from, request);
  }
}

Task<> StateService::answer(int from, const Request& request) {
  std::optional<Error> refused;
  try {
    co_await give(from, request);
  } catch (const Error& error) {
    refused = error;
  } catch (const std::exception& error) {
    refused.emplace(ErrorCode::kUnavailable, error.what());
  }
  if (refused) co_await refuse(from, *refused);
}

/// Gives the values of a piece. All ranks must take part in each step, and the rank that asks is
/// not in one. So the state stays at that rank's generation, which this rank has reached or is
/// about to reach.
Task<> StateService::give(int from, const Request& request) {
  while (generation_ < request.generation && !closing_) {
    made_.reset();
    co_await made_.wait();
  }
  if (closing_)
    throw Error(ErrorCode::kUnavailable,
                "this rank is closing its engine, so its pieces cannot be read any more");
  const Give send = [this, from](std::span<const float> values) -> Task<> {
    Answer head{.count = values.size()};
    co_await answers_->send(bytes_of_message(head), from);
    co_await answers_->send(std::as_bytes(values), from);
  };
  co_await served_.read(request.piece, request.state, send);
}

Task<> StateService::refuse(int from, const Error& error) {
  Answer head{.refusal = 1 + static_cast<std::uint64_t>(error.code())};
  const std::string_view words = error.what();
  std::memcpy(head.why.data(), words.data(), std::min(words.size(), head.why.size() - 1));
  co_await answers_->send(bytes_of_message(head), from);
}

Task<> StateService::until_heard(Peer& peer) {
  while (peer.coming > 0) co_await peer.heard.wait();
}

/// Tells a rank that this one closes, unless that rank has closed too: then it has been told
/// already, or needs no message.
Task<> StateService::tell_closed(int rank, Begun begun) {
  co_await until_heard(peer(rank));
  if (peer(rank).closed) co_return;
  Request notice{.kind = Request::Kind::kClosed, .begun = begun};
  co_await requests_->send(bytes_of_message(notice), rank);
}

Task<> StateService::close(Begun begun) {
  closing_ = true;
  made_.set();
  for (int rank = 0; rank < requests_->world_size(); ++rank) {
    if (rank != requests_->rank()) serving_.spawn(tell_closed(rank, begun));
  }
  try {
    co_await serving_.wait_idle();
  } catch (const std::exception&) {
    // The ranks have failed, so no rank is left to be told.
  }
  requests_->on_send({});
  requests_.reset();
  answers_.reset();
}

}  // namespace ziggurat
