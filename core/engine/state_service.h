// SPDX-License-Identifier: Apache-2.0
// core/engine/state_service.h: the state that ranks have of their own, read by other ranks while
// its own trainer does something else.
//
// Every rank asks and answers. A request is a send() that the other's reactor hears of
// (Communicator::on_send), so nobody stands waiting for one: an idle rank has no call under way,
// and neither a lock-up nor the ranks' timeout is hidden or brought about. Two communicators,
// apart from all others: requests, which have one size, and answers, so that ranks may ask each
// other at once.
//
// A rank that closes tells the others, and ends when all have heard it: whoever asks before that is
// answered, and later nobody asks. Private to the engine. Reactor's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/communicator.h"
#include "core/engine/lent_engine.h"

namespace ziggurat {

class StateService {
 public:
  /// Takes the next values of an array, in order.
  using Give = std::function<Task<>(std::span<const float> values)>;
  struct Served {
    std::vector<LentEngine::Piece> pieces;
    /// Gives array `state` of this rank's piece, at the engine's newest generation.
    std::function<Task<>(std::uint64_t piece, std::uint64_t state, const Give& give)> read;
    /// A rank has closed its engine, which had come to so many steps, made or refused.
    std::function<void(int rank, std::uint64_t steps)> closed;
  };

  /// Among all `ranks`, from which it splits communicators of its own.
  StateService(CancelScope& cancel, Reactor& reactor, Communicator& ranks, Served served);
  /// The pieces of all ranks, once they have told each other. Every rank calls it first.
  Task<> open();
  /// Waits until all have heard that this rank closes, and what they asked is answered.
  Task<> close(std::uint64_t steps);

  /// Errors: kInvalidArgument for a rank that is not there.
  const std::vector<LentEngine::Piece>& pieces_of(int rank) const;
  /// Array `state` of another rank's piece, at `generation`. One at a time. Errors: kUnavailable
  /// for a rank that has closed its engine; those of reading it there.
  Task<> read(int rank, std::uint64_t piece, std::uint64_t state, std::uint64_t generation,
              std::span<float> values);
  /// This rank's engine stands at `generation`: who asked for it is answered.
  void made(std::uint64_t generation);
  /// A rank that has closed its engine; -1: none.
  int closed_rank() const;

 private:
  struct Request;
  struct Answer;
  struct Peer {
    explicit Peer(Reactor& reactor) : heard(reactor) { heard.set(); }
    std::vector<LentEngine::Piece> pieces{};
    bool closed = false;
    std::size_t coming = 0;  ///< requests that are being received
    Signal heard;            ///< none is
  };

  void hear(int from);
  Task<> serve(int from);
  Task<> answer(int from, const Request& request);
  Task<> give(int from, const Request& request);
  Task<> refuse(int from, const Error& error);
  Task<> until_heard(Peer& peer);
  Task<> tell_closed(int rank, std::uint64_t steps);
  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }

  Served served_;
  std::unique_ptr<Communicator> requests_;
  std::unique_ptr<Communicator> answers_;
  std::vector<std::unique_ptr<Peer>> peers_;
  WorkGroup serving_;
  std::uint64_t generation_ = 0;
  Signal made_;  // generation_ changed
  bool closing_ = false;
};

}  // namespace ziggurat
