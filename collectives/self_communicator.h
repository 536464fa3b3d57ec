// SPDX-License-Identifier: Apache-2.0
// collectives/self_communicator.h: the communicator of a single rank: gathers copy, and a sum is
// its input.
#pragma once

#include <memory>
#include <string>

#include "collectives/checked_communicator.h"

namespace ziggurat {

class SelfCommunicator final : public CheckedCommunicator {
 public:
  int rank() const noexcept override { return 0; }
  int world_size() const noexcept override { return 1; }

  /// Carries out a call. If output is input, it costs nothing. There is no rank to send to or
  /// receive from.
  Task<> issue(const Call& call) override { return run(call); }

  void on_send(std::function<void(int from)> hear) override { static_cast<void>(hear); }
  std::unique_ptr<Communicator> split(std::span<const int> members) override;
  std::string description() const override { return "one rank"; }
  Traffic traffic() const override;
  void abort(const std::string& reason) override;

 private:
  struct Fate {
    bool aborted = false;
    std::string reason;  // reason of the first abort
  };
  Task<> refuse(const Error& error) override { return failing(std::make_exception_ptr(error)); }
  Task<> run(Call call);
  void check_alive() const;

  std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();  // shared by all relatives by split()
};

}  // namespace ziggurat
