// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_engine.h: a LentEngine, and what its trainer gives it step by step: each
// parameter has its own type, gradient and settings. What is not here is a call of lent().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/typed_span.h"
#include "core/checkpoint/tensor_piece.h"
#include "core/engine/lent_engine.h"
#include "integrations/c/embedded_device.h"
#include "integrations/c/settings_json.h"

namespace ziggurat {

struct EmbeddedParam {
  std::string name;
  std::vector<std::int64_t> shape;
  std::uint32_t group = 0;
  /// The parameter, lent to the engine. If it is streamed, its first values; without memory only
  /// the type counts.
  TypedSpan<std::byte> values{};
  bool streamed = false;   ///< the engine keeps it
  std::uint32_t unit = 0;  ///< with which it is acquired, if it is streamed
  bool frozen = false;     ///< never trained; after all that are
  bool optional = false;   ///< some steps do not use the unit
  std::uint64_t count() const { return ParamSpec{.name = {}, .shape = shape}.count(); }
};

/// Returns the model that an engine of these parameters has, with a unit for each. Errors:
/// kInvalidArgument for parameters that make no model.
ModelSpec embedded_model(const std::vector<EmbeddedParam>& params, const EmbeddedConfig& config);

/// Returns how many parameters are trained: those that are not frozen.
std::size_t trained_count(const std::vector<EmbeddedParam>& params);

/// Most bytes of a trainer's blob.
inline constexpr std::uint64_t kTrainerBlobBytes = std::uint64_t{1} << 20;

struct EmbeddedStep {
  std::vector<GroupStep> groups;  ///< as many as the largest EmbeddedParam::group, plus one
  float grad_scale = 1;
  std::span<const std::byte> blob;
  bool blob_follows = false;
  bool update_at_once = false;
};

struct LentGradient {
  std::size_t param = 0;
  TypedSpan<const std::byte> values{};
  float scale = 1;
};

/// The state with which an engine begins, in place of its parameters' values.
struct EmbeddedLoad {
  StateSource& source;
  std::vector<TensorPiece> parts;    ///< the part of the source's that each parameter is
  std::vector<std::uint64_t> steps;  ///< steps that each parameter has made
  bool weights_only = false;
  bool continues_line = false;  ///< as LoadOptions::continues_line
};

/// Thread-safe.
class EmbeddedEngine {
 public:
  /// Opens an engine. `config` has all settings. `runtime` must outlive the engine. Errors:
  /// kInvalidArgument for parameters that make no model; those of LentEngine::open().
  EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params, EmbeddedConfig config);
  /// Opens an engine from a copy of the state. The parameters become the masters in it, rounded.
  /// Errors: the same, those of the source, and kInvalidArgument for parts that do not fit.
  EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params, EmbeddedConfig config,
                 const EmbeddedLoad& load);

  /// Returns the engine itself, for calls that do not wait for those of other threads.
  LentEngine& lent() noexcept { return *engine_; }
  const LentEngine& lent() const noexcept { return *engine_; }
  /// Returns the account of the memory for units; of 0 bytes if no parameter is streamed.
  Account units_account() const { return device_ ? device_->device().account() : Account(0); }
  /// Makes a call, `call(lent())`, when those of other threads have ended: where the call fails
  /// because the engine has ended, nobody reads gradients any more. Then it fails first of all.
  template <class Call>
  auto in_turn(const Call& call) {
    const std::lock_guard lock(mutex_);
    engine_->check();
    return call(*engine_);
  }
  std::size_t param_count() const noexcept { return model_.units.size(); }
  /// How many parameters are not frozen. These come first, and only these have gradients, state,
  /// and places in checkpoints.
  std::size_t trained_count() const noexcept { return trained_; }
  std::uint64_t count_of(std::size_t param) const { return model_.units.at(param).count(); }
  /// Returns 0 if there is no such parameter.
  std::uint64_t count_or_none(std::size_t param) const {
    return param < param_count() ? model_.units[param].count() : 0;
  }
  /// Returns the name of a parameter, which must exist.
  const std::string& name_of(std::size_t param) const { return model_.units.at(param).name; }

  // embedded_gradients.cc: gradients of the step to come
  /// Lends the gradient of `param`, in place of an earlier one. It is multiplied by `scale`. The
  /// memory is the caller's again after LentEngine::wait_updated(param) of that step.
  void lend_gradient(std::size_t param, TypedSpan<const std::byte> values, float scale);
  /// Lends several gradients; if one is wrong, lends none.
  void lend_gradients(std::span<const LentGradient> gradients);
  /// Adds to the gradient of `param`, in fp32, in the engine's own memory. What was lent before and
  /// `values` are the caller's again.
  void add_gradient(std::size_t param, TypedSpan<const std::byte> values, float scale);
  /// Sets the factor of a gradient that is there.
  void scale_gradient(std::size_t param, float scale);
  void discard_gradient(std::size_t param);
  void discard_gradients();
  /// Returns the global 2-norm of the gradients, each times its scale: infinity or NaN if one of
  /// them is not finite. Summed in the order of parameters and elements.
  double gradient_norm();
  /// Reads a gradient, times its scale; false if there is none.
  bool read_gradient(std::size_t param, std::span<float> values);

  /// Says that a parameter was written since the last step, so that its master is taken from it
  /// again; of a streamed parameter, that what was written while its unit is acquired goes home:
  /// on a GPU, by work that has ended.
  void param_written(std::size_t param);
  /// Writes state as LentEngine does. A master replaces what param_written() said before.
  void write_state(std::size_t param, std::string_view name, std::span<const float> values);
  /// Returns a stream of the caller's for LentEngine::acquire() and release(). `handle` is the
  /// driver's (cudaStream_t) for a stream on the device's GPU, and null if the device is the host.
  StreamRef& stream_of(void* handle);
  /// Read and write a streamed parameter in its own type, and acquire its unit meanwhile. It may be
  /// one of EngineConfig::wholes.
  void read_param(std::size_t param, TypedSpan<std::byte> values);
  void write_param(std::size_t param, TypedSpan<const std::byte> values);

  StepResult step(const EmbeddedStep& step);
  void give_blob(std::span<const std::byte> blob);
  /// LentEngine's counts of steps; 0 for a frozen parameter.
  std::uint64_t steps_of(std::size_t param) const;
  void set_steps(std::size_t param, std::uint64_t steps);

 private:
  struct Gradient {
    TypedSpan<const std::byte> values{};  ///< lent, or those in `sum`; empty if there is no
                                          ///< gradient
    float scale = 1;
    std::vector<float> sum{};  ///< in the engine's own memory, which is kept from step to step
    bool on_nvme = false;      ///< summed there by the engine (grads=nvme)
    bool present() const noexcept { return on_nvme || !values.bytes.empty(); }
  };

  EmbeddedEngine(Runtime& runtime, const std::vector<EmbeddedParam>& params, EmbeddedConfig config,
                 const EmbeddedLoad* load);
  void make_device(const std::vector<EmbeddedParam>& params, const EmbeddedConfig& config);
  std::unique_ptr<LentEngine> opened_from(const EngineConfig& config, const EmbeddedLoad& load,
                                          std::span<const TypedSpan<std::byte>> lent);
  void forget_gradients();
  void replace_gradient(const LentGradient& its);
  double add_squares_on_nvme(std::size_t param, double squared);
  void sum_gradient(std::size_t param, TypedSpan<const std::byte> values, float scale);
  static bool is_own(const Gradient& gradient);
  double norm_of_gradients();
  StepResult make_step(const EmbeddedStep& step);
  void require_count(const char* call, std::size_t param, std::size_t count) const;
  void require_trained(const char* call, std::size_t param) const;
  Device* device() const noexcept { return device_ ? &device_->device() : nullptr; }
  StreamedUnit require_streamed(const char* call, std::size_t param,
                                TypedSpan<const std::byte> values) const;
  StreamedUnit require_whole(const char* call, std::size_t param,
                             TypedSpan<const std::byte> values) const;
  /// Whether the parameter is a slice of one that is brought whole.
  bool is_slice(std::size_t param) const noexcept {
    return !wholes_.empty() && param < param_count();
  }
  /// Returns the whole parameter that has the number `param`, or null.
  const WholeParam* whole(std::size_t param) const noexcept {
    const std::size_t w = param - param_count();
    return param >= param_count() && w < wholes_.size() ? &wholes_[w] : nullptr;
  }
  TypedDeviceSpan<std::byte> place(std::size_t param) const;
  std::vector<GroupStep> param_steps(const EmbeddedStep& step) const;

  mutable std::mutex mutex_;
  std::mutex copying_;  // taken before mutex_: read_param() and write_param() copy one at a time
  Runtime& runtime_;
  ModelSpec model_;
  std::vector<WholeParam> wholes_;     ///< whose numbers follow those of the parameters
  std::vector<std::uint32_t> groups_;  ///< per parameter
  std::size_t group_count_ = 0;
  bool sums_on_nvme_ = false;
  std::size_t trained_ = 0;                 ///< the first parameters are trained, all others frozen
  std::vector<bool> written_;               ///< per parameter: written since the last step
  std::vector<Gradient> gradients_;         ///< per parameter, for the step to come
  std::shared_ptr<EmbeddedDevice> device_;  // null if no parameter is streamed
  std::unique_ptr<LentEngine> engine_;
};

}  // namespace ziggurat
