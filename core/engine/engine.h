// SPDX-License-Identifier: Apache-2.0
// core/engine/engine.h: what a trainer talks to. The trainer computes; the engine keeps the state,
// moves it and updates it.
//
//   for each step:
//     forward, for every unit in order:
//       params = engine.acquire(u); compute; engine.release(u)
//     backward, for every unit in reverse:
//       params = engine.acquire(u); compute into engine.gradient(u);
//       engine.release(u); engine.finish_gradient(u)
//     engine.step({.learning_rate = ..., .blob = cursor})
//
// Micro-batches of a step come best as K of a unit, then the next unit. Each may run through the
// whole model instead: gradient() gives the same accumulator until finish_gradient(), called in the
// last; all accumulators are then on the device at once, and stage 3 gathers 2K times.
//
// A trainer that computes on a GPU gives the stream on which it queues what uses a unit
// (CudaDevice::caller_stream): the engine's copies and the trainer's kernels then wait for each
// other on the GPU, and the trainer's thread for NVMe, running updates and memory alone.
// integrations/device_mlp is the worked example of this, integrations/gpt that of the CPU.
//
// Calls block until what they promise is true. They may come from any thread and are made one at a
// time; among ranks their order is the program's. A call out of order (a unit that is not there,
// release() without acquire(), finish_gradient() without gradient(), acquire() after
// finish_gradient()) is kInvalidArgument and changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/device_span.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/runtime/metrics.h"
#include "base/typed_span.h"
#include "core/checkpoint/load_options.h"
#include "core/checkpoint/state_line.h"
#include "core/engine/engine_config.h"
#include "core/engine/runtime.h"
#include "core/sharding/model_spec.h"
#include "core/sharding/shard.h"
#include "optimizer/schedule.h"
#include "tiers/device.h"

namespace ziggurat {

class StateSource;

/// What a step does to the parameters of one group.
struct GroupStep {
  float learning_rate = 0;
  float beta1 = 0.9F;  ///< SGD: the momentum
  float beta2 = 0.999F;
  float eps = 1e-8F;
  float weight_decay = 0;  ///< of all the group's parameters, whatever ParamSpec::decay says
  float grad_scale = 1;    ///< multiplies their gradients
  /// Steps that they have made with this one, where they do not take part in all; 0: in all.
  std::uint64_t steps = 0;
  /// Lent parameters were written by the trainer since the last step: their masters are taken anew
  /// before this one, their moments stay.
  bool params_written = false;
  float dampening = 0;    ///< SGD: the share of a gradient that its momentum leaves out
  bool nesterov = false;  ///< SGD: the update looks one step of the momentum ahead
  bool maximize = false;  ///< up the gradient
  bool operator==(const GroupStep&) const = default;
};

/// A checkpoint of a step, for other places and other layouts (core/checkpoint/checkpoint_save.h).
struct CheckpointRequest {
  std::string folder;  ///< the checkpoint is FOLDER/step-NNNNNNNNN; made if it is not there
  /// What the trainer says of its run beside its blob: JSON texts, by kResumeNames.
  std::map<std::string, std::string> resume;
  std::uint64_t keep_last = 0;   ///< checkpoints of the folder that stay, the newest; 0: all
  std::uint64_t keep_every = 0;  ///< and those of steps that it divides
  bool keep_best = false;        ///< and that of the "step" in resume's "best_metric"
};

/// What became of a save.
struct SaveOutcome {
  std::uint64_t step = 0;
  std::string directory;
  std::optional<Error> failure{};  ///< none: it is whole and durable
  std::uint64_t size_bytes = 0;    ///< that this rank wrote
  double seconds = 0;
  double stalled_s = 0;  ///< that updates waited for it
  /// Rank 0's: what lies in the folder and was left there, though it was to go.
  std::vector<std::string> notes{};
};

struct StepOptions {
  float learning_rate = 0;
  std::optional<Betas> betas =
      std::nullopt;  ///< of this step, in place of EngineConfig::optimizer's
  /// A trainer's own groups, one for each ParamSpec::group, anew each step: in place of the two
  /// above and of EngineConfig::optimizer's. Not beside EngineConfig::param_groups.
  std::span<const GroupStep> groups = {};
  /// What the trainer multiplied the loss by (LossScaler::scale()); gradients are divided by it.
  /// Where it is given, a norm that is not finite skips the step instead of being an error, so
  /// updates before the norm are guesses, as with clipping.
  std::optional<float> loss_scale = std::nullopt;
  /// The step, once made, is saved while training goes on; every rank gives one, or none does. Not
  /// while a save is under way on any rank: StepResult::saves says on all that it was not begun.
  /// With EngineConfig::Checkpoint::saves.
  const CheckpointRequest* checkpoint = nullptr;
  std::span<const std::byte> blob;  ///< the trainer's own state (data cursor, RNG), copied, made
                                    ///< durable with this step; at most as the config says
  /// It comes later (LentEngine::give_blob), and the step is not durable before.
  bool blob_follows = false;
  /// LentEngine: step() returns only when every unit is updated whose state is in memory. For a
  /// trainer that computes on the workers' cores: a forward beside updates waits for both.
  bool update_at_once = false;
};

struct StepResult {
  std::uint64_t generation = 0;  ///< the generation this step makes; not durable yet
  double grad_norm = 0;  ///< global 2-norm of the rounded gradients' mean over ranks, unclipped
  bool clipped = false;
  bool skipped = false;  ///< the gradients overflowed: nothing changed, generation is the old one
  bool saves = false;    ///< the checkpoint that was asked for is on its way
};

/// Fills `values` with the initial fp32 values of elements [first, first + values.size()) of
/// `unit`'s flat parameters.
using Initializer = std::function<void(UnitId unit, std::uint64_t first, std::span<float> values)>;

/// What Engine::open() throws where a store is there and no generation of it is whole: on every
/// rank alike. Nothing of it was changed, and the ranks may open another engine.
class StoreLost : public Error {
 public:
  explicit StoreLost(const std::string& message, std::optional<StateLine> line = std::nullopt)
      : Error(ErrorCode::kDataLoss, message), line_(std::move(line)) {}
  /// The line of history that the store was of, where that much of it can be read here.
  const std::optional<StateLine>& line() const noexcept { return line_; }

 private:
  std::optional<StateLine> line_;
};

class Engine {
 public:
  /// Opens or creates the state of `model`. Resumes at the newest durable generation if
  /// config.resume says so and there is one. Every rank of runtime.ranks opens its engine, and
  /// makes the same calls in the same order. `runtime` and `device` must outlive the engine; the
  /// device must have been made on runtime.reactor. Errors: kInvalidArgument (another model, dtype,
  /// world size, seed or batch; budget nonsense), kResourceExhausted (a budget too small, with the
  /// account and the smallest that works; a full disk), StoreLost (no valid generation),
  /// kUnavailable (in use).
  static std::unique_ptr<Engine> open(const ModelSpec& model, const EngineConfig& config,
                                      Runtime& runtime, Device& device,
                                      const Initializer& initialize);
  /// The same from any copy of the state (core/checkpoint/state_source.h), however it was cut and
  /// held there. A store that is there and may be resumed goes before it. Errors beside: those of
  /// the source, and of what does not fit the model or the optimizer.
  static std::unique_ptr<Engine> open(const ModelSpec& model, const EngineConfig& config,
                                      Runtime& runtime, Device& device, StateSource& source,
                                      const LoadOptions& options);
  virtual ~Engine() = default;

  /// Makes `unit`'s parameters present on the device, in ModelSpec::dtype, all of this generation,
  /// and pins them there until release(). Shapes: flat, in ModelSpec's order. Nested acquires
  /// count. What is queued on `stream` from now on finds them; a trainer on the CPU has a
  /// HostDevice, and HostDevice::view() of them.
  ///
  /// A stream is one of the engine's device, or the Host, on which they are there when the call
  /// returns. Several may be used, and each call may name another: an order between them is the
  /// trainer's to make. When the engine is closed, nothing that uses what was not released or
  /// finished is under way. Errors of the four calls: kInvalidArgument, changing nothing, for a
  /// stream that captures a graph; the device's own, if it is lost.
  virtual TypedDeviceSpan<const std::byte> acquire(UnitId unit, StreamRef& stream) = 0;
  TypedDeviceSpan<const std::byte> acquire(UnitId unit) {
    Host host;
    return acquire(unit, host);
  }
  /// What `stream` has queued so far is the last that reads them: nothing frees, reuses or
  /// overwrites them before it has ended. On the Host it has.
  virtual void release(UnitId unit, StreamRef& stream) = 0;
  void release(UnitId unit) {
    Host host;
    release(unit, host);
  }

  /// `unit`'s fp32 gradient accumulator on the device, zero when a step first asks for it; what is
  /// queued on `stream` from now on may add into it.
  virtual DeviceSpan<float> gradient(UnitId unit, StreamRef& stream) = 0;
  DeviceSpan<float> gradient(UnitId unit) {
    Host host;
    return gradient(unit, host);
  }
  /// With what `stream` has queued so far `unit`'s gradient of this step is complete: rounds it
  /// once to the model's type and sends it on its way; the span is gone. The unit's parameters may
  /// change from now on: they are not acquired again before step(). Not needed of a unit whose
  /// parameters are all frozen (ParamGroup::frozen): ranks do not exchange its gradient.
  virtual void finish_gradient(UnitId unit, StreamRef& stream) = 0;
  void finish_gradient(UnitId unit) {
    Host host;
    finish_gradient(unit, host);
  }

  /// Optional, before the step's first finish_gradient(): with the step's options known, updates
  /// may start during backward instead of after it (EngineConfig::speculation), and are undone if
  /// the step turns out bad. step() must then be given the same, but for the blob.
  virtual void prepare_step(const StepOptions& options) { static_cast<void>(options); }

  /// Ends the step: every unit's gradient must be finished. Waits for the norm, starts the
  /// optimizer sweep and returns; the sweep goes on under the next forward. Waits, if need be,
  /// until the generation before is durable. Errors: kInvalidArgument, at once, naming a unit whose
  /// gradient is not finished. After these the state is as before the step's first gradient, on
  /// every rank, and training can go on: kNotFinite for a norm that is not;
  /// kInvalidArgument for options that make no step, or other ones than another rank's. After any
  /// other the engine has ended: every call throws, and the newest durable generation is whole.
  virtual StepResult step(const StepOptions& options) = 0;

  /// Generation the parameters now stand at (number of finished steps), and the newest durable one.
  virtual std::uint64_t generation() const = 0;
  virtual std::uint64_t durable_generation() const = 0;
  /// Waits until every finished step is durable on every rank; with state placed off NVMe, writes a
  /// checkpoint first. A step under way is no part of it: its records do not change before step(),
  /// so it may be called in mid-backward too. Call before exit: where ranks are several, one that
  /// closes its engine without it ends the others' calls.
  virtual void make_durable() = 0;

  /// Saves the newest step, and returns when that is done; a save under way is waited for first.
  /// Errors: why it failed; nothing of it is left then, and training may go on.
  virtual void save_checkpoint(const CheckpointRequest& request) = 0;
  /// Waits for the save under way. Before make_durable() at the end of a run. Like
  /// save_checkpoint() it waits no longer than the target of the save answers: one that has not for
  /// EngineConfig::Checkpoint::stall_max_s, and no less than 10 s, hangs, and the save is given up.
  virtual void finish_saves() = 0;
  /// A save was given up so, and its target has not come back: a thread stands in a call of it. The
  /// engine's destruction would wait for that; who wants to end sooner leaves the engine, and what
  /// it uses, as they are, and ends the process.
  virtual bool saves_hang() const { return false; }
  /// Saves that ended, well or not, since this was asked last.
  virtual std::vector<SaveOutcome> ended_saves() = 0;

  /// True if open() found a store and resumed, or loaded a state with its step; then the blob of
  /// the generation it goes on from.
  virtual bool resumed() const = 0;
  virtual std::span<const std::byte> resumed_blob() const = 0;

  /// Streams the fp32 master parameters of `unit` at generation() into `consume(first, values)`, in
  /// element order: those that this rank updates.
  virtual void read_master(
      UnitId unit,
      const std::function<void(std::uint64_t first, std::span<const float> values)>& consume) = 0;

  /// Where each class of state is: what was chosen, if the config left it to the engine.
  virtual Placement placement() const { return {}; }
  /// Host memory that can hold records while the sweep waits for the norm, and memory that keeps
  /// records from sweep to sweep: what a step's lower bound depends on.
  virtual std::uint64_t read_ahead_bytes() const { return 0; }
  virtual std::uint64_t kept_record_bytes() const { return 0; }
  /// How long opening took to make, load or read the state, once the budgets' memory was there.
  virtual double state_seconds() const { return 0; }
  virtual const Metrics& metrics() const = 0;
  virtual Account host_account() const = 0;
  /// What was chosen and measured at open (I/O path, page kind, chunk table, durability): lines for
  /// the start of a run.
  virtual std::vector<std::string> description() const = 0;
  /// The line of history that its states belong to: what its checkpoints say.
  virtual StateLine line() const = 0;
};

}  // namespace ziggurat
