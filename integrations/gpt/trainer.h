// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/trainer.h: GPT-2's forward and backward over an engine's parameters. It shows
// how to embed the engine.
//
// The trainer owns its activations and nothing else. Parameters come from Engine::acquire, and
// gradients go into Engine::gradient; the trainer does not know where either is kept. A step is:
//
//   std::vector<Batch> micro_batches = ...;                    // RunShape::accumulate of them
//   double loss = trainer.forward_backward(micro_batches);     // acquires, computes, releases
//   engine.step({.learning_rate = lr, .blob = cursor});        // every gradient is finished
//
// One thread, the engine's trainer thread. Bits depend on shapes, data and parameters, and on what
// numerics_fingerprint() names; never on the number of workers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/runtime/worker_pool.h"
#include "core/engine/engine.h"
#include "core/plan/device_plan.h"
#include "integrations/gpt/model.h"
#include "integrations/gpt/row_share.h"
#include "integrations/gpt/text.h"
#include "tiers/device/host_device.h"

namespace ziggurat::gpt {

enum class ActivationCheckpointing : std::uint8_t {
  kBlock,  ///< keeps each block's input only; backward computes the rest again
  kOff,    ///< keeps all activations
};

struct RunShape {
  std::int64_t batch = 2;       ///< sequences of a micro-batch
  std::int64_t accumulate = 4;  ///< micro-batches of a step
  std::int64_t context = 256;   ///< bytes of a sequence
  ActivationCheckpointing checkpointing = ActivationCheckpointing::kBlock;

  /// Whether each tensor-parallel rank keeps only its own rows of the values between the divided
  /// layers (integrations/gpt/row_share.h).
  bool sequence_parallel = false;

  std::int64_t rows() const { return batch * context; }
  std::int64_t tokens_per_step() const { return accumulate * rows(); }
  RowShare row_share(const ModelConfig& model) const {
    return sequence_parallel ? RowShare::of(rows(), model.part.rank, model.part.ranks)
                             : RowShare::whole(rows());
  }
};

/// Wall seconds that the workers have computed since construction. Forward includes evaluation, but
/// not recomputation.
struct ComputeSeconds {
  double forward = 0;
  double backward = 0;
};

struct SampleOptions {
  std::int64_t count = 200;  ///< bytes to add to the prompt
  float temperature = 0.8F;  ///< 0 takes the likeliest byte
  std::uint64_t seed = 1;
  /// Called with each byte as it is drawn; may be empty.
  std::function<void(char)> on_byte;
};

class TensorRanks;

class Trainer {
 public:
  /// Allocates the whole workspace (Purpose::kActivations) once. The references must outlive the
  /// trainer. `tensor` is the ranks that divide the model, of which this rank has model.part, or
  /// null if that is the whole model. Each of these ranks makes the same calls, with the same
  /// batches. Errors: kInvalidArgument (a shape out of range, rows that do not divide, a device
  /// whose memory the CPU cannot reach); kResourceExhausted (device budget).
  Trainer(Engine& engine, HostDevice& device, WorkerPool& workers, const ModelConfig& model,
          const RunShape& shape, TensorRanks* tensor = nullptr);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Returns the device bytes that the constructor asks for.
  static std::uint64_t workspace_bytes(const ModelConfig& model, const RunShape& shape,
                                       std::size_t threads);

  /// Returns what a plan must know: workspace_bytes(), and that the embedding, which is also the
  /// head's matrix, is in use through the whole backward.
  static TrainerNeed need(const ModelConfig& model, const RunShape& shape, std::size_t threads);

  /// Runs forward and backward of one step in vertical order: all micro-batches of a unit before
  /// the next unit. Returns the mean loss over the step's tokens, in nats. Every unit's gradient of
  /// `loss_scale` times that mean is then finished, so engine.step() may follow, with that scale.
  /// Errors: kInvalidArgument unless there are `accumulate` micro-batches of batch x context; and
  /// the engine's.
  double forward_backward(std::span<const Batch> micro_batches, float loss_scale = 1.0F);

  /// Returns the mean loss over `micro_batches` (any number, each of batch x context); makes no
  /// gradient.
  double evaluate(std::span<const Batch> micro_batches);

  /// Returns `prompt` (at least one byte) and what the model adds to it. The model sees at most the
  /// last `context` bytes. If ranks divide the model, each of them calls this and gets the same
  /// text.
  std::string sample(const std::string& prompt, const SampleOptions& options);

  ComputeSeconds compute_seconds() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Names what decides the bits of forward and backward besides our own code: "oneDNN 2.6.3
/// avx512_core_bf16, bf16 dot: yes".
std::string numerics_fingerprint();

}  // namespace ziggurat::gpt
