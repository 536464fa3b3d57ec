// SPDX-License-Identifier: Apache-2.0
// collectives/simulated/mirrored_communicator.h: one rank among many that all do what it does, at
// the same time. Only this rank exists: what the others give is what it gives itself, and the time
// of a call is a closed form of the network's, so a call among thousands of ranks costs no more
// than one among two.
//
// This is rank 0. The others are said to have slices of the same size, to make the same calls and
// to come to each call together; that is for the caller to know. Groups that split() makes have
// their counterparts on the other ranks of the node, which use the node's port at the same time.
// A port is taken to be busy as long as there is anything to send. That is what ranks of one or two
// nodes reach; among more nodes, direct messages that are sent in turn also wait for each other,
// and a simulation of every message takes up to twice as long.
//
// A message to a single rank has no mirror image, so send() and recv() fail. Reactor's thread only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/absent_memory.h"
#include "base/runtime/trace.h"
#include "collectives/checked_communicator.h"
#include "collectives/simulated/simulated_network.h"

namespace ziggurat {

class MirroredWorld;  // the rank's ports, which its groups share

class MirroredCommunicator final : public CheckedCommunicator {
 public:
  /// Bytes in `absent` take their time and are not moved; null if there are none. `trace`, which
  /// may be null, shows when the ports are busy. Both outlive the communicator. Errors: those of
  /// SimulatedNetwork.
  static std::unique_ptr<Communicator> create(Reactor& reactor, const NetworkShape& shape,
                                              const AbsentMemory* absent = nullptr,
                                              Trace* trace = nullptr);

  int rank() const noexcept override { return place_; }
  int world_size() const noexcept override { return static_cast<int>(members_.size()); }

  Task<> issue(const Call& call) override;
  /// Does nothing, because nobody sends.
  void on_send(std::function<void(int from)>) override {}
  std::unique_ptr<Communicator> split(std::span<const int> members) override;
  std::string description() const override;
  Traffic traffic() const override;
  void abort(const std::string& reason) override;

 private:
  MirroredCommunicator(std::shared_ptr<MirroredWorld> world, std::vector<int> members);

  Task<> refuse(const Error& error) override;
  void mirror_bytes(const Call& call) const;

  std::shared_ptr<MirroredWorld> world_;
  std::vector<int> members_;  // ranks of the network, of which this is 0
  int place_;
};

}  // namespace ziggurat
