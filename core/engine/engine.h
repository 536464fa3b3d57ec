// SPDX-License-Identifier: Apache-2.0
// core/engine/engine.h: the interface for a trainer. The trainer computes; the engine keeps the
// state, moves it and updates it.
//
//   for each step:
//     forward, for every unit in order:
//       params = engine.acquire(u); compute; engine.release(u)
//     backward, for every unit in reverse:
//       params = engine.acquire(u); compute into engine.gradient(u);
//       engine.release(u); engine.finish_gradient(u)
//     engine.step({.learning_rate = ..., .blob = cursor})
//
// With K micro-batches in a step it is best to run all K through one unit, then all K through the
// next unit. Each micro-batch may run through the whole model instead. Then gradient() returns the
// same accumulator until finish_gradient(), which is called in the last micro-batch; all
// accumulators are on the device at once, and stage 3 gathers 2K times.
//
// A trainer that computes on a GPU gives the stream on which it queues the work that uses a unit
// (CudaDevice::caller_stream). The engine's copies and the trainer's kernels then wait for each
// other on the GPU. The trainer's thread waits only for NVMe, running updates and memory.
// integrations/device_mlp is an example of a trainer on a GPU, integrations/gpt of one on the CPU.
//
// Calls block until what they promise is true. They may come from any thread, one at a time; all
// ranks make them in the same order. A wrong call (a unit that does not exist, release() without
// acquire(), finish_gradient() without gradient(), acquire() after finish_gradient()) throws
// kInvalidArgument and changes nothing.
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
#include "tiers/device/device.h"

namespace ziggurat {

class StateSource;

/// The settings of a step for the parameters of one group.
struct GroupStep {
  float learning_rate = 0;
  float beta1 = 0.9F;  ///< SGD: the momentum
  float beta2 = 0.999F;
  float eps = 1e-8F;
  /// Applies to all parameters of the group, whatever ParamSpec::decay says.
  float weight_decay = 0;
  float grad_scale = 1;  ///< factor by which their gradients are multiplied
  /// How many steps the parameters have made, including this one, if they do not take part in all;
  /// 0 if they do. With EngineConfig::counts_steps the engine knows.
  std::uint64_t steps = 0;
  /// Divides the learning rate by 1 + (steps - 1) * lr_decay (torch.optim.Adagrad).
  float lr_decay = 0;
  /// The trainer has written lent parameters since the last step. Their masters are made from them
  /// again before this step; their moments stay.
  bool params_written = false;
  float dampening = 0;    ///< SGD: the part of a gradient that does not go into the momentum
  bool nesterov = false;  ///< SGD: whether the update looks one step of the momentum ahead
  bool maximize = false;  ///< steps go up the gradient, not down
  bool operator==(const GroupStep&) const = default;
};

/// A checkpoint of a step, which other machines and layouts can read
/// (core/checkpoint/checkpoint_save.h).
struct CheckpointRequest {
  /// The checkpoint is FOLDER/step-NNNNNNNNN; the folder is made if it does not exist.
  std::string folder;
  /// What the trainer stores about its run besides its blob: JSON texts, by kResumeNames.
  std::map<std::string, std::string> resume;
  /// How many of the newest checkpoints in the folder are kept; 0 keeps all.
  std::uint64_t keep_last = 0;
  std::uint64_t keep_every = 0;  ///< also keeps every step that is a multiple of this
  bool keep_best = false;  ///< also keeps the checkpoint of the "step" in resume's "best_metric"
};

/// The result of a save.
struct SaveOutcome {
  std::uint64_t step = 0;
  std::string directory;
  std::optional<Error> failure{};  ///< none if the checkpoint is complete and durable
  std::uint64_t size_bytes = 0;    ///< bytes that this rank wrote
  double seconds = 0;
  double stalled_s = 0;  ///< seconds that updates waited for the save
  /// On rank 0: files in the folder that should have been removed and were left there.
  std::vector<std::string> notes{};
};

struct StepOptions {
  float learning_rate = 0;
  /// The betas of this step, instead of EngineConfig::optimizer's.
  std::optional<Betas> betas = std::nullopt;
  /// The trainer's own groups, one for each ParamSpec::group, given again in each step. They
  /// replace the two members above and EngineConfig::optimizer's settings. Must not be used
  /// together with EngineConfig::param_groups.
  std::span<const GroupStep> groups = {};
  /// The factor by which the trainer multiplied the loss (LossScaler::scale()); gradients are
  /// divided by it. If it is given, a norm that is not finite skips the step and is no error. So
  /// updates before the norm are guesses, as with clipping.
  std::optional<float> loss_scale = std::nullopt;
  /// If given, the step is saved while training goes on. Either all ranks give a request or none
  /// does. If a save is still under way on any rank, no save begins, and StepResult::saves is false
  /// on all ranks. Needs EngineConfig::Checkpoint::saves.
  const CheckpointRequest* checkpoint = nullptr;
  /// The trainer's own state (data cursor, RNG). It is copied and becomes durable with this step.
  /// Its size is limited by EngineConfig::blob_bytes_max.
  std::span<const std::byte> blob;
  /// The blob comes later (give_blob()), and the step is not durable before that.
  bool blob_follows = false;
  /// LentEngine: step() returns only when all units whose state is in memory are updated. For a
  /// trainer that computes on the workers' cores, where a forward at the same time as updates would
  /// slow down both.
  bool update_at_once = false;
};

struct StepResult {
  std::uint64_t generation = 0;  ///< the generation that this step makes; not durable yet
  /// Global 2-norm, before clipping, of the rounded gradients' mean over ranks.
  double grad_norm = 0;
  bool clipped = false;
  /// The gradients overflowed: nothing changed, and generation is the old one.
  bool skipped = false;
  bool saves = false;  ///< the requested checkpoint is being saved
};

/// Fills `values` with the initial fp32 values of elements [first, first + values.size()) of
/// `unit`'s flat parameters.
using Initializer = std::function<void(UnitId unit, std::uint64_t first, std::span<float> values)>;

/// The error of Engine::open() if a store exists but has no complete generation. All ranks throw
/// it. The store was not changed, and the ranks may open another engine.
class StoreLost : public Error {
 public:
  explicit StoreLost(const std::string& message, std::optional<StateLine> line = std::nullopt)
      : Error(ErrorCode::kDataLoss, message), line_(std::move(line)) {}
  /// Returns the line of history to which the store belonged, if this rank could read it.
  const std::optional<StateLine>& line() const noexcept { return line_; }

 private:
  std::optional<StateLine> line_;
};

/// A part of the parameters of a model that a rank has.
struct RankPiece {
  std::string name;
  std::uint64_t count = 0;  ///< elements
};

/// The calls on the state that every engine has, whoever trains.
class StateEngine {
 public:
  virtual ~StateEngine() = default;

  /// Return the generation of the current parameters (the number of finished steps), and the newest
  /// durable generation.
  virtual std::uint64_t generation() const = 0;
  virtual std::uint64_t durable_generation() const = 0;
  /// Waits until every finished step is durable on every rank. If state is not on NVMe, writes a
  /// checkpoint first. May be called in the middle of a step: the records that it makes durable do
  /// not change before step(). Must be called before exit: if one of several ranks closes its
  /// engine without this call, the calls of the other ranks fail.
  virtual void make_durable() = 0;

  /// Gives the blob of the step that was made with StepOptions::blob_follows. Until then no other
  /// step can be made, nor a checkpoint. Errors: kInvalidArgument if no step waits for a blob, or
  /// if the blob is too long.
  virtual void give_blob(std::span<const std::byte> blob) = 0;

  /// Saves the newest step and returns when that is done. If a save is under way, waits for that
  /// first. Errors: why the save failed; then nothing of it is left, and training may go on.
  virtual void save_checkpoint(const CheckpointRequest& request) = 0;
  /// Waits for the save that is under way. Should be called before make_durable() at the end of a
  /// run. Like save_checkpoint(), it waits only as long as the target of the save answers. If the
  /// target has not answered for EngineConfig::Checkpoint::stall_max_s (and at least 10 s; 8 min
  /// while the save begins or ends), it is considered to hang, and the save is given up.
  virtual void finish_saves() = 0;
  /// Whether a save was given up because its target hangs, and a thread is still blocked in a call
  /// to that target. Closing the engine would wait for this thread. To end sooner, end the
  /// process without closing the engine and destroying what it uses.
  virtual bool saves_hang() const { return false; }
  /// Ends the engine: everything that waits fails, and what is under way is awaited. Then memory of
  /// the trainer is not used any more, and later calls throw kCancelled, but for those that say
  /// what was: they answer as of then. Not while another call is under way. The destructor waits
  /// for nothing after this, and else does the same.
  virtual void close() = 0;
  /// Returns the saves that have ended since the last call, whether they succeeded or failed.
  virtual std::vector<SaveOutcome> ended_saves() = 0;

  /// Returns whether open() resumed from a store, or loaded a state with its step. If so,
  /// resumed_blob() returns the blob of that generation.
  virtual bool resumed() const = 0;
  virtual std::span<const std::byte> resumed_blob() const = 0;

  /// Returns where each class of state is. If the config left it to the engine, this is what the
  /// engine chose.
  virtual Placement placement() const { return {}; }
  /// Return how much host memory can hold records while the sweep waits for the norm, and how much
  /// memory keeps records from sweep to sweep. The lower bound of a step's time depends on both.
  virtual std::uint64_t read_ahead_bytes() const { return 0; }
  virtual std::uint64_t kept_record_bytes() const { return 0; }
  /// Returns how many seconds opening took to make, load or read the state, after memory was
  /// allocated.
  virtual double state_seconds() const { return 0; }
  virtual const Metrics& metrics() const = 0;
  virtual Account host_account() const = 0;
  /// Returns lines for the start of a run: what was chosen and measured at open (I/O path, kind of
  /// pages, chunk table, durability).
  virtual std::vector<std::string> description() const = 0;
  /// Returns the line of history to which the engine's states belong. Its checkpoints record it.
  virtual StateLine line() const = 0;
};

/// The fp32 master parameters of consecutive elements of a unit.
struct MasterChunk {
  std::uint64_t first = 0;    ///< the first element in the unit's flat parameters
  std::vector<float> values;  ///< without padding, and so it may be empty
};

/// An engine for a trainer that computes with parameters which the engine brings to a device, unit
/// by unit.
class Engine : public StateEngine {
 public:
  /// Opens or creates the state of `model`. Resumes at the newest durable generation if
  /// config.resume says so and there is one. Every rank of runtime.ranks opens its engine, and
  /// makes the same calls in the same order. `runtime` and `device` must outlive the engine; the
  /// device must have been made on runtime.reactor. Errors: kInvalidArgument (another model, dtype,
  /// world size, seed or batch; an impossible budget), kResourceExhausted (a budget too small, with
  /// the account and the smallest that works; a full disk), StoreLost (no valid generation),
  /// kUnavailable (in use).
  static std::unique_ptr<Engine> open(const ModelSpec& model, const EngineConfig& config,
                                      Runtime& runtime, Device& device,
                                      const Initializer& initialize);
  /// Opens an engine in the same way, but creates the state from a copy
  /// (core/checkpoint/state_source.h), which may have any layout and format. If a store exists and
  /// may be resumed, the copy is not used. Further errors: those of the source; kInvalidArgument if
  /// the copy does not fit the model or the optimizer.
  static std::unique_ptr<Engine> open(const ModelSpec& model, const EngineConfig& config,
                                      Runtime& runtime, Device& device, StateSource& source,
                                      const LoadOptions& options);
  /// Makes `unit`'s parameters of the current generation present on the device, in
  /// ModelSpec::dtype, and pins them there until release(). They are flat, in ModelSpec's order.
  /// Nested acquires count. Work that is queued on `stream` from now on finds them. A trainer on
  /// the CPU has a HostDevice and reads them through HostDevice::view().
  ///
  /// A stream belongs to the engine's device, or is the Host, for which the parameters are present
  /// when the call returns. Several streams may be used, and each call may name another one; the
  /// trainer must order work on different streams itself. When the engine is closed, no work may be
  /// under way that uses units which were not released or finished. Errors of these four calls:
  /// kInvalidArgument, changing nothing, for a stream that captures a graph; the device's own, if
  /// it is lost.
  virtual TypedDeviceSpan<const std::byte> acquire(UnitId unit, StreamRef& stream) = 0;
  TypedDeviceSpan<const std::byte> acquire(UnitId unit) {
    Host host;
    return acquire(unit, host);
  }
  /// Unpins the parameters: the work queued on `stream` so far is the last that reads them. They
  /// are not freed, reused or overwritten before that work has ended. On the Host it has ended
  /// already.
  virtual void release(UnitId unit, StreamRef& stream) = 0;
  void release(UnitId unit) {
    Host host;
    release(unit, host);
  }

  /// Returns `unit`'s fp32 gradient accumulator on the device, which is zero when a step first asks
  /// for it. Work that is queued on `stream` from now on may add to it.
  virtual DeviceSpan<float> gradient(UnitId unit, StreamRef& stream) = 0;
  DeviceSpan<float> gradient(UnitId unit) {
    Host host;
    return gradient(unit, host);
  }
  /// Ends `unit`'s gradient of this step, which is complete with the work queued on `stream` so
  /// far. The gradient is rounded once to the model's type and sent on its way; the span of
  /// gradient() is no longer valid. The unit's parameters may change from now on, so they cannot be
  /// acquired again before step(). Not needed for a unit whose parameters are all frozen
  /// (ParamGroup::frozen), because ranks do not exchange its gradient, nor for one that is
  /// UnitSpec::optional and has no gradient in this step.
  virtual void finish_gradient(UnitId unit, StreamRef& stream) = 0;
  void finish_gradient(UnitId unit) {
    Host host;
    finish_gradient(unit, host);
  }

  /// Optionally called before the step's first finish_gradient(). When the step's options are
  /// known, updates may start during backward instead of after it (EngineConfig::speculation); they
  /// are undone if the step turns out bad. step() must then be given the same options, except for
  /// the blob.
  virtual void prepare_step(const StepOptions& options) { static_cast<void>(options); }

  /// Ends the step. Every unit's gradient must be finished, but those of optional units that have
  /// none. Among several ranks the gradients of optional units stay on the device until here, and
  /// are then exchanged in the order of the model; in stage 3 all ranks acquire them alike. Waits
  /// for the norm, starts the optimizer sweep and returns; the sweep goes on during the next
  /// forward. If necessary, waits until the previous generation is durable.
  ///
  /// Errors: kInvalidArgument, at once, naming a unit whose gradient is not finished. After the
  /// following errors the state is as before the step's first gradient, on every rank, and training
  /// can go on: kNotFinite for a norm that is not finite; kInvalidArgument for invalid options, or
  /// options that differ from another rank's. After any other error the engine has ended: every
  /// call throws, and the newest durable generation is undamaged.
  virtual StepResult step(const StepOptions& options) = 0;

  /// Returns how many chunks of `unit` this rank updates.
  virtual std::size_t master_chunks(UnitId unit) const = 0;
  /// Reads the fp32 master parameters of one of them, numbered from 0 in the order of elements, at
  /// generation(). Errors: kInvalidArgument for a chunk that this rank does not have; kDataLoss for
  /// a damaged record.
  virtual MasterChunk read_master(UnitId unit, std::size_t chunk) = 0;
};

}  // namespace ziggurat
