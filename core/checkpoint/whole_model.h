// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/whole_model.h: fp32 masters that lie on several ranks, read as one model: rank 0
// gets whole units in element order, whichever rank has them.
//
// A unit lies in `slices` among data-parallel ranks, and where layers are divided each slice is of
// one part: rank = slice * parts + part. Ranks beyond those have copies, and send nothing. Blocks;
// the trainer's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/runtime/reactor.h"
#include "collectives/communicator.h"
#include "core/sharding/model_spec.h"

namespace ziggurat {

class WholeModel {
 public:
  using Consume = std::function<void(std::span<const float>)>;
  /// Gives this rank's own masters of a unit to `Consume`, in element order, in pieces.
  using ReadOwn = std::function<void(UnitId, const Consume&)>;

  struct Layout {
    int slices = 1;  ///< data-parallel ranks among which each unit lies, 0 first
    int parts = 1;   ///< tensor-parallel ranks that divide each layer: neighbours
  };
  /// `model` has the shapes of the whole. `channel` is of all ranks, and carries nothing else while
  /// read() runs. All references must outlive this.
  WholeModel(ModelSpec model, Layout layout, Reactor& reactor, Communicator& channel,
             ReadOwn read_own);

  /// Every rank calls it for the same units; on rank 0 `consume` gets the unit in pieces.
  void read(UnitId unit, const Consume& consume);

 private:
  void give(UnitId unit);
  void take(UnitId unit, int part, const Consume& consume);
  void take_from(int rank, const Consume& consume);
  void take_parts(UnitId unit, const Consume& consume);
  void send(std::span<const std::byte> bytes);
  void recv(std::span<std::byte> bytes, int from);

  ModelSpec model_;
  Layout layout_;
  Reactor& reactor_;
  Communicator& channel_;
  ReadOwn read_own_;
  int rank_;
};

}  // namespace ziggurat
