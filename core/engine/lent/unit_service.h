// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/unit_service.h: gives other ranks this rank's slices of a unit's parameters,
// while its trainer does something else, and asks them for theirs.
//
// Every rank asks for what it needs when it needs it: no order of uses is agreed upon, so one rank
// may evaluate alone, or call an expert that no other calls. A request is a send() that the other
// rank's reactor notices, as in state_service.h, and names a unit, a generation and the rank whose
// slices are asked for: the one that is asked, or with hpZ (node_copies.h) one of another node, of
// which the one that is asked has a copy, or asks for it itself. A rank answers the requests of one
// other rank in their order. A request to the rank that has the slices waits for no third one, so
// no two ranks wait for each other.
//
// A rank that closes its engine says so, and goes on answering until every other rank has heard it:
// what they have asked before is answered, and they ask nothing more.
//
// Between two generations parameters change. All ranks have agreed to the step then, so nobody
// needs those of the generation before: who still asks for them, because it brought something
// ahead, is told that they are stale. Private to the engine. Reactor's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/communicator.h"
#include "core/engine/lent/whole_layout.h"
#include "core/engine/lent_engine.h"
#include "core/schedule/turns.h"

namespace ziggurat {

class UnitService {
 public:
  enum class Came : std::uint8_t {
    kWhole,        ///< all is there
    kStale,        ///< the generation is over
    kClosed,       ///< the rank that was asked has closed its engine
    kOwnerClosed,  ///< the rank of which it was asked for a copy has
  };
  /// Sends a message, which stays as it is until this ends.
  using Give = std::function<Task<>(std::span<const std::byte> message)>;
  /// Whose slices are asked for, and how they are to come.
  struct Asked {
    int of = 0;
    StreamedUnit unit = 0;
    std::uint64_t generation = 0;
    WholeForm form = WholeForm::kExact;
  };
  struct Served {
    /// Gives the slices that are asked for, message by message. Returns whether it has: nothing was
    /// given if not.
    std::function<Task<Came>(const Asked& asked, const Give& give)> slices;
    /// Starts a task in the background. If it fails, the engine does.
    std::function<void(Task<> task)> spawn;
  };

  /// Splits communicators of its own from `ranks`, which has all ranks.
  UnitService(CancelScope& cancel, Reactor& reactor, Communicator& ranks, Served served);
  /// Nothing is under way any more.
  ~UnitService();
  UnitService(const UnitService&) = delete;
  UnitService& operator=(const UnitService&) = delete;

  /// Called when a message has come, before the next one does: they may have the same memory.
  using Landed = std::function<Task<>(std::size_t message)>;
  /// Brings slices from `rank`, each message into its part of `messages`. Errors: those of reading
  /// them on that rank, which name it; kUnavailable if it is gone.
  Task<Came> bring(int rank, Asked asked, std::span<const std::span<std::byte>> messages,
                   const Landed& landed);

  /// Notes that parameters are about to change, and waits until nobody is being given any.
  Task<> begin_changes();
  /// Notes the generation that parameters have from now on, each once it is at home.
  void begin_generation(std::uint64_t generation);
  /// Tells all ranks that this one closes its engine, and answers what they have asked before they
  /// heard it. Returns when they ask nothing more. Not for an engine that has failed.
  Task<> close();

 private:
  struct Request {
    enum class Kind : std::uint32_t {
      kUnit,    ///< asks for slices
      kClosed,  ///< the sender closes its engine, and asks nothing more
      kHeard,   ///< answers kClosed; the sender asks nothing more
    };
    Kind kind = Kind::kUnit;
    Asked asked{};
  };
  struct Answer;
  struct Peer {
    explicit Peer(CancelScope& turns) : asking(turns), answering(turns) {}
    std::uint64_t asked = 0;  ///< requests to it
    Turns asking;             ///< in which its answers are received
    std::uint64_t heard = 0;  ///< requests of it
    Turns answering;
    std::uint64_t coming = 0;  ///< of those that were noticed, how many are still received
    bool closed = false;       ///< it has said that it closes
    bool parted = false;       ///< it has heard that this rank closes
  };

  void hear(int from);
  Task<> serve(int from, bool noticed);
  Task<> answer(int from, const Request& request);
  Task<> give(int from, const Asked& asked);
  Task<> say(int from, Came came);
  Task<> refuse(int from, const Error& error);
  Task<> send_request(int to, Request request);
  Task<> receive(int rank, std::span<const std::span<std::byte>> messages, const Landed& landed,
                 Came& came);
  Task<> part(int other);
  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }

  CancelScope& cancel_;
  Reactor& reactor_;
  Served served_;
  std::unique_ptr<Communicator> requests_;
  std::unique_ptr<Communicator> answers_;
  // The turns end when what they wait for has ended, also in an engine that has ended.
  CancelScope to_the_end_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::uint64_t generation_ = 0;
  bool open_ = false;      // a generation has begun
  bool changing_ = false;  // parameters change until the next one begins
  bool closing_ = false;
  Signal begun_;             // set when one of these changes
  std::size_t giving_ = 0;   // answers under way
  Signal given_;             // set when one has ended
  std::size_t serving_ = 0;  // requests under way
  Signal served_one_;        // set when one has been received, or has ended
};

}  // namespace ziggurat
