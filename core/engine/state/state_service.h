// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_service.h: lets ranks read the state that other ranks have, while the
// trainer of the other rank does something else.
//
// Every rank sends requests and answers them. A request is a send() that the other rank's reactor
// notices (Communicator::on_send), so no rank has to wait for requests. An idle rank has no call
// under way, so this neither hides nor causes a lock-up or a timeout of the ranks. There are two
// communicators, used for nothing else: one for requests, which all have the same size, and one for
// answers. So two ranks may ask each other at the same time.
//
// A rank that closes tells the other ranks, and ends when all have received this. Requests that
// come before are answered; afterwards no rank sends any. Private to the engine. Reactor's thread.
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
#include "core/engine/engine.h"

namespace ziggurat {

class StateService {
 public:
  /// How many agreements a rank has begun with the others. Those of calls come in the same order on
  /// every rank. Checkpoints of their own accord do too, but not in the same order among the calls:
  /// one begins when a rank gives a blob.
  struct Begun {
    std::uint64_t calls = 0;
    std::uint64_t checkpoints = 0;
  };
  /// Receives the next values of an array, in order.
  using Give = std::function<Task<>(std::span<const float> values)>;
  struct Served {
    std::vector<RankPiece> pieces;
    /// Passes array `state` of one of this rank's pieces, at the engine's newest generation, to
    /// `give`.
    std::function<Task<>(std::uint64_t piece, std::uint64_t state, const Give& give)> read;
    /// Called when a rank has closed its engine, which had begun so many agreements.
    std::function<void(int rank, const Begun& begun)> closed;
  };

  /// Splits communicators of its own from `ranks`, which has all ranks.
  StateService(CancelScope& cancel, Reactor& reactor, Communicator& ranks, Served served);
  /// Exchanges the pieces of all ranks. Every rank calls it first.
  Task<> open();
  /// Waits until all ranks know that this rank closes, and until their requests are answered.
  Task<> close(Begun begun);

  /// Returns the pieces of `rank`. Errors: kInvalidArgument for a rank that does not exist.
  const std::vector<RankPiece>& pieces_of(int rank) const;
  /// Reads array `state` of another rank's piece at `generation`. Only one read may be under way.
  /// Errors: kUnavailable for a rank that has closed its engine; those of reading the array on that
  /// rank.
  Task<> read(int rank, std::uint64_t piece, std::uint64_t state, std::uint64_t generation,
              std::span<float> values);
  /// Notes that this rank's engine is at `generation`, so that requests for it are answered.
  void made(std::uint64_t generation);
  /// Returns a rank that has closed its engine; -1 if none has.
  int closed_rank() const;

 private:
  struct Request;
  struct Answer;
  struct Peer {
    explicit Peer(Reactor& reactor) : heard(reactor) { heard.set(); }
    std::vector<RankPiece> pieces{};
    bool closed = false;
    std::size_t coming = 0;  ///< requests that are being received
    Signal heard;            ///< set while there are none
  };

  void hear(int from);
  Task<> serve(int from);
  Task<> answer(int from, const Request& request);
  Task<> give(int from, const Request& request);
  Task<> refuse(int from, const Error& error);
  Task<> until_heard(Peer& peer);
  Task<> tell_closed(int rank, Begun begun);
  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }

  Served served_;
  std::unique_ptr<Communicator> requests_;
  std::unique_ptr<Communicator> answers_;
  std::vector<std::unique_ptr<Peer>> peers_;
  WorkGroup serving_;
  std::uint64_t generation_ = 0;
  Signal made_;  // set when generation_ changes
  bool closing_ = false;
};

}  // namespace ziggurat
