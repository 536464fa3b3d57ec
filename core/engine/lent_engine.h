// SPDX-License-Identifier: Apache-2.0
// core/engine/lent_engine.h: an engine for a trainer that knows parameters: it keeps gradients, and
// those parameters for which it has room, in its own memory and lends that memory. Nothing of that
// is copied.
//
//   for each step:
//     forward, wait_updated(p) before a parameter is used; backward
//     engine.step(gradients, {.groups = ...})
//
// A trainer that clips computes the norm of its gradients itself (GroupStep::grad_scale). The
// engine reads no gradient before the update, so StepResult::grad_norm is not a number, and
// gradients that are not finite spread to the state. Nothing is updated before step().
//
// Small parameters of one type share records (core/sharding/packing.h): they become updated
// together, and all else they have for themselves.
//
// Other parameters may be streamed (ParamSpec::streamed): the engine keeps them in host memory or
// on NVMe, and the trainer acquires them unit by unit:
//
//   engine.acquire(u, stream); engine.place(p) for each parameter p of u; compute
//   engine.release(u, stream)
//
// acquire() may wait for memory that another thread's release() gives back. Units that are used in
// the same order in each step are brought ahead.
//
// A streamed parameter may be frozen (ParamSpec::frozen): it is never trained, and the store has
// nothing of it, neither values nor state. The trainer gives its values to each engine anew, with
// open() or store_param(). Frozen parameters come after all others. An engine whose parameters are
// all frozen needs no store, and makes no step.
//
// With several ranks (Runtime::ranks), each rank opens an engine for its own pieces of the
// parameters. The trainers decide which pieces these are and what shapes they have, and exchange
// gradients and parameters themselves. The engines keep the ranks at one generation. Each rank has
// a store. All ranks make a step or none does. A generation is durable when all ranks have sealed
// it, and recovery goes to the newest generation that is undamaged on all ranks. Every rank takes
// part in each step, even if it has no gradient.
//
// When a call throws because the engine has ended, no job reads or writes lent memory, and none
// ever will: the trainer may use it again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/device_span.h"
#include "base/error.h"
#include "base/runtime/async.h"
#include "core/checkpoint/load_options.h"
#include "core/engine/engine.h"
#include "core/engine/state_copy.h"
#include "optimizer/state_kind.h"

namespace ziggurat {

/// Number of a unit of streamed parameters (ParamSpec::streamed).
using StreamedUnit = std::uint32_t;

/// What an engine has received of whole parameters (EngineConfig::wholes), in bytes.
struct FromRanks {
  std::uint64_t bytes = 0;              ///< from all other ranks
  std::uint64_t other_nodes_bytes = 0;  ///< of these, from ranks of other nodes, with hpZ
};

class LentEngine : public StateEngine {
 public:
  /// Opens an engine like Engine::open(). `model` has a unit for each parameter, and `params` has
  /// their values, without padding, in the unit's type. Values of a streamed parameter are read at
  /// open only, and may be empty: it then begins with zeros. `device` may be null if there are no
  /// streamed parameters; it must have been made on runtime.reactor and outlive the engine. It may
  /// be a GPU: gradients and lent parameters are in host memory all the same. A
  /// ParamId is the number of a parameter in this order. If EngineConfig::host_budget_bytes is 0,
  /// the engine takes as much as a run uses well. The masters of a new store are made from them,
  /// and the masters of an existing store are written to them. Records on NVMe are made in the
  /// first step, and the store begins with it: before that step is durable, there is no store, or
  /// still the one that `resume=never` replaces. Without a store the records are in memory, and
  /// nothing is durable. With Placement::automatic the engine keeps in host memory what fits there
  /// (core/plan/lent_placement.h), and description() says why.
  ///
  /// EngineConfig::run_identity and the settings must be equal on all ranks. `model` may differ,
  /// and so may the strategy in `config`, which divides nothing here. Errors: Engine::open()'s;
  /// kInvalidArgument for memory that does not fit the model, or for clipping.
  static std::unique_ptr<LentEngine> open(const ModelSpec& model, EngineConfig config,
                                          Runtime& runtime,
                                          std::span<const TypedSpan<std::byte>> params,
                                          Device* device = nullptr);
  /// Opens an engine in the same way, but from a copy of the state (a PieceSource for pieces), as
  /// Engine::open() does. `params` are written: each becomes its master, rounded.
  static std::unique_ptr<LentEngine> open(const ModelSpec& model, EngineConfig config,
                                          Runtime& runtime,
                                          std::span<const TypedSpan<std::byte>> params,
                                          StateSource& source, const LoadOptions& options,
                                          Device* device = nullptr);

  /// Returns how many steps a trained parameter has made, and changes that: the new count is that
  /// of the next step, and durable with it. Errors: kInvalidArgument without
  /// EngineConfig::counts_steps.
  virtual std::uint64_t steps_of(ParamId param) const = 0;
  virtual void set_steps(ParamId param, std::uint64_t steps) = 0;
  /// If the store was divided anew since the trainer gave resumed_blob(): how many ranks it had
  /// then. The blob is that of their rank 0. Otherwise 0.
  virtual std::uint64_t resumed_blob_ranks() const = 0;

  /// Adds `scale` times `values` to a sum of gradients of `param` on NVMe, in fp32; the memory is
  /// the trainer's again on return. The step to come takes the sum in place of an empty gradient.
  /// The first summand is added to zeros, or takes their place (`instead_of_zeros`). Needs
  /// `placement` with grads=nvme. Errors: kInvalidArgument without it, or for a wrong number of
  /// elements; those of the drive. After one of the drive's the sum may lack a part of the
  /// summand: it is refused, by step() too, until discard_sum().
  virtual void add_gradient(ParamId param, TypedSpan<const std::byte> values, float scale,
                            bool instead_of_zeros = false) = 0;
  /// Returns what has come from other ranks so far.
  virtual FromRanks from_ranks() const = 0;
  /// Forgets the sum of `param`, if it has one.
  virtual void discard_sum(ParamId param) = 0;
  /// Reads elements of the sum of `param` from `first` on. Errors: kInvalidArgument if it has none.
  virtual void read_sum(ParamId param, std::uint64_t first, std::span<float> values) = 0;

  /// Makes a step with `gradients`: one for each parameter, without padding, in any type. A
  /// parameter with an empty gradient and no sum does not take part: it has no decay, and the step
  /// is not counted for it. Returns when the sweep has begun. The engine uses the memory until
  /// wait_updated(param).
  ///
  /// Errors are thrown on every rank if one has them, and name that rank. After kInvalidArgument
  /// for invalid options or a wrong number of elements, after kUnimplemented, and where the drive
  /// has not taken a sum of gradients, nothing was changed. After any other error the engine has
  /// ended on all ranks. All ranks must give the same
  /// generation and the same options, except for groups: each rank has groups for its own
  /// parameters.
  virtual StepResult step(std::span<const TypedSpan<const std::byte>> gradients,
                          const StepOptions& options) = 0;
  /// Called instead of step() if this rank's trainer cannot make the step that the other ranks are
  /// making. They get an error that names this rank and `why`, and nothing is changed. Throws
  /// `why`.
  virtual void refuse_step(const Error& why) = 0;
  /// Brings all parameters of `unit` to the device, at generation(), and pins them there until
  /// release(). Acquires of a unit count. Work that is queued on `stream` from now on finds the
  /// parameters; on the Host they are there when the call returns. `stream` belongs to the caller
  /// (CudaDevice::caller_stream) or is the Host. Errors: kInvalidArgument for a unit that does not
  /// exist, or a stream that captures; kResourceExhausted if its memory cannot come back, because
  /// other units are acquired; kUnavailable if the device is lost, and then the engine has ended.
  virtual void acquire(StreamedUnit unit, StreamRef& stream) = 0;
  /// The same, but the order in which units are brought ahead is not learned from it, and quantized
  /// parameters (WholeParam::quantized) come as they are: for who reads or writes parameters beside
  /// the trainer's forward and backward. While it lasts acquire() finds the same values. Errors:
  /// kInvalidArgument too while the unit is acquired with rounded values.
  virtual void acquire_aside(StreamedUnit unit, StreamRef& stream) = 0;
  /// Unpins the unit; the work that is queued on `stream` so far is the last that uses it. All
  /// units must be released before step().
  virtual void release(StreamedUnit unit, StreamRef& stream) = 0;
  /// Brings units ahead of their use, as far as there is room: the trainer will use them next. This
  /// is never needed. Unknown units are an error.
  virtual void expect_units(std::span<const StreamedUnit> units) = 0;
  /// Fails those threads that wait in acquire(), and those that will, with kCancelled: the engine
  /// is about to be closed. Those whose memory is being brought wait for the drive first.
  virtual void end_waits() = 0;
  /// Returns where a streamed parameter is on the device while its unit is acquired, without
  /// padding, aligned to its elements. Numbers from the count of parameters on are those of
  /// EngineConfig::wholes; a slice lies within its whole.
  virtual TypedDeviceSpan<std::byte> place(ParamId param) const = 0;
  /// Brings home what the trainer has written into an acquired parameter with work that is queued
  /// on `stream`. The next step is given GroupStep::params_written for it. Before the first step it
  /// is the parameter's master at once, for read_state() and begin_copy() too. Until that step is
  /// durable, a crash loses what was written. After any error except kInvalidArgument the engine
  /// has ended, because a part of the parameter may be home. A unit that has quantized parameters
  /// was acquired aside. Of a whole parameter this rank's slice
  /// is brought home: all ranks write the same, and from the first one's write to the last one's
  /// none uses the unit but to write.
  virtual void store_param(ParamId param, StreamRef& stream) = 0;

  /// Read and write a streamed parameter where it lives, in its own type, without its unit, which
  /// is not acquired by anybody. Meant for this rank's slices (EngineConfig::wholes). What is
  /// written is as after store_param(); a rank that has brought the unit before, and writes no
  /// slice of it, keeps what it has until the next step. Errors: kInvalidArgument for a parameter
  /// that is lent, an acquired unit, or another type or number of elements; after any other error
  /// of a write the engine has ended.
  virtual void read_home(ParamId param, TypedSpan<std::byte> values) = 0;
  virtual void write_home(ParamId param, TypedSpan<const std::byte> values) = 0;

  /// Takes the new memory of a parameter, which the trainer has moved. Waits for an update of it
  /// that is under way. Errors: kInvalidArgument for another type or number of elements.
  virtual void lend_param(ParamId param, TypedSpan<std::byte> values) = 0;
  /// Notes that the step's gradients are being computed, so records may be read ahead.
  virtual void expect_gradients() = 0;
  /// Waits until `param` is that of the newest step.
  virtual void wait_updated(ParamId param) = 0;
  virtual void wait_all_updated() = 0;

  /// Whether the engine has ended: then calls keep throwing. Lent memory is the trainer's again
  /// when a call has thrown.
  virtual bool has_ended() const noexcept = 0;
  /// Throws the error with which the engine has ended, if it has, as every other call does.
  virtual void check() = 0;

  /// Returns the names that the next two calls know: "master", and the optimizer's moments by
  /// torch.optim's names.
  virtual std::vector<std::string> state_names() const = 0;
  /// Reads `param`'s array `name` at generation(), widened to fp32, without padding; includes
  /// values that were written since. Waits until the newest step's update of the parameter is
  /// written. Errors: kInvalidArgument for an unknown name or a wrong number of elements; kDataLoss
  /// for a damaged record.
  virtual void read_state(ParamId param, std::string_view name, std::span<float> values) = 0;
  /// Sets the array to `values`, rounded to nearest in the store's format (in 8 bits each block
  /// gets a new scale). The next step uses the new values, whether the parameter has a gradient or
  /// not. It also makes the parameter from a written master, unless the trainer has written the
  /// parameter since (GroupStep::params_written). Everything that is written between two steps
  /// becomes durable with the second step, or not at all; until then it takes memory. It fails as
  /// read_state() does.
  virtual void write_state(ParamId param, std::string_view name, std::span<const float> values) = 0;

  /// Returns how the state is rounded, if the store records it. Checkpoints record the same.
  virtual std::optional<Roundings> rounding() const = 0;
  /// Returns the format of the arrays that begin_copy() gives.
  virtual StateKind copied_state(bool widen_codes) const = 0;
  /// Begins to copy the state at generation(), with what was written since. The copy goes on while
  /// the trainer makes steps and writes state, which do not change it. One copy at a time: errors
  /// are kInvalidArgument while there is another, and those of read_state().
  virtual std::shared_ptr<StateCopy> begin_copy(const CopyOptions& options) = 0;

  using Piece = RankPiece;  ///< one of a rank's parameters
  /// Returns the pieces of `rank`, which may be this rank. Errors: kInvalidArgument for a rank that
  /// does not exist.
  virtual std::vector<Piece> pieces_of(int rank) const = 0;
  /// Reads the state of a piece that `rank` has, like read_state(), by the piece's name. That
  /// rank's trainer makes no call: it may compute, sleep, or wait in a step. The values are those
  /// of this rank's generation(), and include what that trainer has written since; no rank can make
  /// another step before this rank takes part in it. Before the first step that trainer must not
  /// write its parameters meanwhile either: its records may not be made yet. Errors: those of
  /// read_state(), naming the rank; kUnavailable if that rank has closed its engine.
  virtual void read_state_of(int rank, std::string_view piece, std::string_view name,
                             std::span<float> values) = 0;
};

}  // namespace ziggurat
