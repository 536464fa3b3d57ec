// SPDX-License-Identifier: Apache-2.0
// core/engine/lent_engine.h: an engine for a trainer that keeps parameters and gradients in memory
// of its own, and lends it: nothing is copied, and no device is the engine's.
//
//   for each step:
//     forward, wait_updated(u) before a unit is used; backward
//     engine.step(gradients, {.groups = ...})
//
// A trainer that clips takes the norm of its gradients itself (GroupStep::grad_scale); the engine
// looks at none of them before the update, so StepResult::grad_norm is not a number, and gradients
// that are not finite spread. Nothing is updated before step().
//
// Among several ranks (Runtime::ranks) each opens an engine of its own pieces of the parameters:
// which, and of what shapes, is the trainers' business, and so is what they exchange of gradients
// and parameters. The engines keep the ranks at one generation: a store each, a step that all make
// or none does, a generation that is durable when all have sealed it, recovery to the newest that
// is whole on all. Every rank makes each step, if without a single gradient.
//
// When a call throws because the engine has ended, nothing reads or writes lent memory any more,
// nor will: it is the trainer's again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "core/checkpoint/load_options.h"
#include "core/engine/engine.h"
#include "optimizer/state_kind.h"

namespace ziggurat {

class LentEngine : public Engine {
 public:
  /// As Engine::open(). `params`: each unit's parameters, without padding, in the unit's type; what
  /// a new store's masters are made from, and where those of a store that is there are written.
  /// Without a store the records are in memory, and nothing is durable. Ranks must have alike what
  /// EngineConfig::run_identity says, and their settings; not `model`, and not the strategy's part
  /// of `config`, which divides nothing here. Errors: Engine::open()'s; kInvalidArgument for memory
  /// that does not fit the model, or clipping.
  static std::unique_ptr<LentEngine> open(const ModelSpec& model, EngineConfig config,
                                          Runtime& runtime,
                                          std::span<const TypedSpan<std::byte>> params);
  /// The same from a copy of the state (PieceSource, for pieces), as Engine::open() has it.
  /// `params` are written as those of a store that is there: each is its master, rounded.
  static std::unique_ptr<LentEngine> open(const ModelSpec& model, EngineConfig config,
                                          Runtime& runtime,
                                          std::span<const TypedSpan<std::byte>> params,
                                          StateSource& source, const LoadOptions& options);

  /// Makes a step of `gradients`, one for each unit, without padding, in any type; a unit whose is
  /// empty is left out of the step: no decay, no count. Returns when the sweep has begun: the
  /// memory is the engine's until wait_updated(unit). In place of Engine's, whose calls of
  /// gradients are errors here. Errors, on every rank if one has them, naming it:
  /// kInvalidArgument for options that make no step, or another number of elements, and
  /// kUnimplemented: nothing was changed. After any other the engine has ended, on all ranks. What
  /// ranks must have alike is the generation, and of the options what is no group's: groups are
  /// those of parameters, and each rank has its own.
  virtual StepResult step(std::span<const TypedSpan<const std::byte>> gradients,
                          const StepOptions& options) = 0;
  using Engine::step;
  /// In place of step(), where this rank's trainer finds that it cannot make the one that the
  /// others are making: they get an error that names this rank and `why`, and nothing is changed.
  /// Throws `why`.
  virtual void refuse_step(const Error& why) = 0;
  /// The parameters of `unit` are elsewhere now. Waits for an update of them. Errors:
  /// kInvalidArgument for another type or number of elements.
  virtual void lend_params(UnitId unit, TypedSpan<std::byte> params) = 0;
  /// The step's gradients are on their way: records may be read ahead.
  virtual void expect_gradients() = 0;
  /// Waits until `unit`'s parameters are those of the newest step.
  virtual void wait_updated(UnitId unit) = 0;
  virtual void wait_all_updated() = 0;
  /// The blob of the step that was made with StepOptions::blob_follows. Errors: kInvalidArgument
  /// where none is awaited, or it is too long.
  virtual void give_blob(std::span<const std::byte> blob) = 0;

  /// The engine has ended: what throws does so for good, and lent memory is the trainer's again.
  virtual bool has_ended() const noexcept = 0;
  /// Throws what the engine has ended with, if it has, as every other call does.
  virtual void check() = 0;

  /// "master", and the optimizer's moments by torch.optim's names: what the next two know.
  virtual std::vector<std::string> state_names() const = 0;
  /// `unit`'s array `name` at generation(), widened to fp32, without padding; what was written
  /// since is in it. Waits until the newest step's update of the unit is written. Errors:
  /// kInvalidArgument for a name or number of elements that it does not have; kDataLoss for a
  /// record that is not what was written.
  virtual void read_state(UnitId unit, std::string_view name, std::span<float> values) = 0;
  /// The array is `values` from now on, rounded to nearest as the store's format has it (8 bits:
  /// every block's scale anew). The next step goes on from them, whether the unit has a gradient or
  /// not, and gives the unit the parameters of a written master, unless its parameters were written
  /// since (GroupStep::params_written). All that is written between two steps becomes durable with
  /// the second, or not at all; until then it takes memory. Errors: as read_state()'s.
  virtual void write_state(UnitId unit, std::string_view name, std::span<const float> values) = 0;

  /// How the state is rounded, if its store says so: what its checkpoints say.
  virtual std::optional<Roundings> rounding() const = 0;
  /// Codes of 8 bits may be copied as the fp32 values that they stand for: their blocks are those
  /// of a piece, and not of the whole parameter.
  virtual StateKind copied_state(bool widen_codes) const = 0;
  /// Elements [first, ..) of `unit`'s array, of state_arrays(copied_state()), bit for bit.
  using TakeArray = std::function<Task<>(UnitId unit, std::size_t array, std::uint64_t first,
                                         std::span<const std::byte> values)>;
  /// Gives every array of every unit at generation() to `take`, on the reactor's thread, a chunk at
  /// a time: what was written since is in it. Errors: read_state()'s; those of `take`.
  virtual void copy_state(bool widen_codes, const TakeArray& take) = 0;

  /// What a rank has of the parameters: its units.
  struct Piece {
    std::string name;
    std::uint64_t count = 0;  ///< elements
  };
  /// This rank's too. Errors: kInvalidArgument for a rank that is not there.
  virtual std::vector<Piece> pieces_of(int rank) const = 0;
  /// read_state() of a piece that `rank` has, by name. That rank's trainer calls nothing: it may
  /// compute, sleep, or wait in a step. The values are those of this rank's generation(), with what
  /// that trainer has written since: no rank makes another step before this one takes part in it.
  /// Errors: read_state()'s, naming the rank; kUnavailable where it has closed its engine.
  virtual void read_state_of(int rank, std::string_view piece, std::string_view name,
                             std::span<float> values) = 0;
};

}  // namespace ziggurat
