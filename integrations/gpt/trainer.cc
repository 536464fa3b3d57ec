// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/trainer.cc: how a trainer uses the engine. Read forward_backward() first, then
// the functions that it calls.
#include "integrations/gpt/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "integrations/gpt/block.h"
#include "integrations/gpt/head.h"
#include "integrations/gpt/regions.h"
#include "integrations/gpt/sampler.h"
#include "integrations/gpt/tensor_passes.h"
#include "integrations/gpt/tensor_ranks.h"
#include "integrations/gpt/trainer_space.h"

namespace ziggurat::gpt {
namespace {

// Acquires a unit's parameters for as long as this object lives.
class AcquiredUnit {
 public:
  AcquiredUnit(Engine& engine, UnitId unit, DType dtype)
      : engine_(engine), unit_(unit), params_(HostDevice::view(engine.acquire(unit))) {
    ZIGGURAT_CHECK(params_.dtype == dtype, "the engine's parameters are {}, the trainer's model {}",
                   to_string(params_.dtype), to_string(dtype));
  }
  ~AcquiredUnit() { engine_.release(unit_); }
  AcquiredUnit(const AcquiredUnit&) = delete;
  AcquiredUnit& operator=(const AcquiredUnit&) = delete;

  ConstArray params() const noexcept { return params_; }

 private:
  Engine& engine_;
  UnitId unit_;
  ConstArray params_;
};

void check_shape(const ModelConfig& model, const RunShape& shape) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); };
  if (shape.batch < 1 || shape.batch > 4096)
    refuse(fmt::format("batch {} must be from 1 to 4096", shape.batch));
  if (shape.accumulate < 1 || shape.accumulate > 4096)
    refuse(fmt::format("accumulate {} must be from 1 to 4096", shape.accumulate));
  if (shape.context < 1 || shape.context > model.context_max) {
    refuse(
        fmt::format("context {} must be from 1 to {}, the number of positions that the model has",
                    shape.context, model.context_max));
  }
  if (!shape.sequence_parallel) return;
  const int ranks = model.part.ranks;
  if (ranks == 1)
    refuse(
        "`sp` needs tensor parallelism, and `tp` is 1: set `tp` to 2 or more, or leave `sp` out");
  if (shape.rows() % ranks != 0) {
    refuse(
        fmt::format("sequence parallelism divides batch {} x context {} = {} rows, which {} ranks "
                    "cannot divide evenly: {} would be left over",
                    shape.batch, shape.context, shape.rows(), ranks, shape.rows() % ranks));
  }
}

}  // namespace

class Trainer::Impl {
 public:
  Impl(Engine& engine, HostDevice& device, WorkerPool& workers, const ModelConfig& model,
       const RunShape& shape, TensorRanks* tensor)
      : engine_(engine),
        workers_(workers),
        tensor_(tensor),
        regions_(workers),
        model_(model),
        shape_(shape),
        memory_(device.allocate(workspace_bytes(model, shape, workers.threads()),
                                Purpose::kActivations)),
        block_(model, {shape.batch, shape.context, shape.row_share(model)}, workers.threads()),
        head_(model, shape.row_share(model), workers.threads()) {
    Carver carver(memory_.data());
    space_ = TrainerSpace::carve(model, shape, workers.threads(), carver);
    if (tensor) divided_.emplace(model, shape, block_, head_, space_, regions_, *tensor);
  }

  double forward_backward(std::span<const Batch> batches, float loss_scale) {
    forward(batches);
    const double loss = head(batches, loss_scale);
    for (std::int64_t block = model_.layers - 1; block >= 0; --block)
      backward_block(block, batches.size());
    embed_backward(batches);
    return loss;
  }

  double evaluate(std::span<const Batch> batches) {
    double loss = 0;
    const auto most = static_cast<std::size_t>(shape_.accumulate);
    for (std::size_t first = 0; first < batches.size(); first += most) {
      const auto some = batches.subspan(first, std::min(most, batches.size() - first));
      forward(some);
      loss += head(some, kNoGradient) * static_cast<double>(some.size());
    }
    return loss / static_cast<double>(batches.size());
  }

  std::string sample(const std::string& prompt, const SampleOptions& options) {
    const SamplerSpace space{
        .context = shape_.context, .trainer = space_, .regions = regions_, .tensor = tensor_};
    return gpt::sample(engine_, workers_.threads(), model_, space, prompt, options);
  }

  void check(std::span<const Batch> batches) const;
  const RunShape& shape() const noexcept { return shape_; }
  ComputeSeconds seconds() const noexcept { return regions_.seconds(); }

 private:
  static constexpr float kNoGradient = 0;
  static constexpr auto kForward = &ComputeSeconds::forward;
  static constexpr auto kBackward = &ComputeSeconds::backward;

  void forward(std::span<const Batch> batches) {
    {
      const AcquiredUnit unit(engine_, kEmbeddingUnit, model_.dtype);
      for (std::size_t k = 0; divided_ && k < batches.size(); ++k)
        divided_->embed(unit.params(), batches[k], space_.stream[0][k]);
      if (!divided_) {
        regions_.run("embed", kForward, [&](Team& team) {
          for (std::size_t k = 0; k < batches.size(); ++k) {
            head_.embed(team, unit.params(), batches[k].inputs, shape_.context,
                        space_.stream[0][k]);
          }
        });
      }
    }
    for (std::int64_t block = 0; block < model_.layers; ++block)
      forward_block(block, batches.size());
  }

  // Vertical order: runs every micro-batch through the unit while its parameters are on the device.
  void forward_block(std::int64_t block, std::size_t micro_batches) {
    const auto i = static_cast<std::size_t>(block);
    const AcquiredUnit unit(engine_, block_unit(block), model_.dtype);
    const auto keep = checkpointing() ? Block::Keep::kNothing : Block::Keep::kAll;
    const auto pass = [&](std::size_t k) {
      return Block::Forward{.params = unit.params(),
                            .x = space_.stream[i][k],
                            .activations = space_.activations[i][k],
                            .keep = keep,
                            .y = space_.stream[i + 1][k],
                            .partial = space_.d_rows};
    };
    for (std::size_t k = 0; divided_ && k < micro_batches; ++k)
      divided_->forward(pass(k), kForward);
    if (divided_) return;
    regions_.run("forward", kForward, [&](Team& team) {
      for (std::size_t k = 0; k < micro_batches; ++k) block_.forward(team, space_.scratch, pass(k));
    });
  }

  // Returns the mean loss. With a scale it goes backward too: each micro-batch's output becomes its
  // gradient.
  double head(std::span<const Batch> batches, float loss_scale) {
    const AcquiredUnit unit(engine_, kEmbeddingUnit, model_.dtype);
    const bool backward = loss_scale != kNoGradient;
    const auto tokens = static_cast<double>(shape_.rows()) * static_cast<double>(batches.size());
    const auto scale = static_cast<float>(static_cast<double>(loss_scale) / tokens);
    float* gradient =
        backward ? HostDevice::view(engine_.gradient(kEmbeddingUnit)).data() : nullptr;
    double sum = 0;
    for (std::size_t k = 0; k < batches.size(); ++k) {
      const Array x = space_.stream.back()[k];
      if (divided_) {
        divided_->head(unit.params(), batches[k], scale, x, gradient);
      } else {
        regions_.run("head", kForward, [&](Team& team) {
          head_.norm(team, unit.params(), x, space_.head);
          head_.logits(team, space_.scratch, unit.params(), space_.head);
          head_.loss(team, batches[k].targets, scale, space_.head);
          if (!backward) return;
          head_.logits_backward(team, space_.scratch, unit.params(), space_.head, gradient);
          head_.norm_backward(team, unit.params(), x, space_.head, gradient);
        });
      }
      for (std::int64_t row = 0; row < shape_.rows(); ++row)
        sum += static_cast<double>(space_.head.losses[row]);
    }
    return sum / tokens;
  }

  void backward_block(std::int64_t block, std::size_t micro_batches) {
    const auto i = static_cast<std::size_t>(block);
    const UnitId id = block_unit(block);
    {
      const AcquiredUnit unit(engine_, id, model_.dtype);
      const std::span<float> gradient = HostDevice::view(engine_.gradient(id));
      const auto again = [&](std::size_t k) {
        return Block::Forward{.params = unit.params(),
                              .x = space_.stream[i][k],
                              .activations = space_.activations[i][k],
                              .keep = Block::Keep::kAll,
                              .y = {},
                              .partial = space_.d_rows};
      };
      const auto pass = [&](std::size_t k) {
        return Block::Backward{.params = unit.params(),
                               .x = space_.stream[i][k],
                               .activations = space_.activations[i][k],
                               .gradient = space_.stream.back()[k],
                               .all_gradient = space_.stream.back()[k],
                               .d_rows = space_.d_rows,
                               .d_params = gradient.data()};
      };
      if (divided_) {
        for (std::size_t k = 0; k < micro_batches; ++k) {
          if (checkpointing()) divided_->forward(again(k), kBackward);
          divided_->backward(pass(k));
        }
        divided_->sum_shared(id, gradient);
      } else {
        regions_.run("backward", kBackward, [&](Team& team) {
          for (std::size_t k = 0; k < micro_batches; ++k) {
            if (checkpointing()) block_.forward(team, space_.scratch, again(k));
            block_.backward(team, space_.scratch, pass(k));
          }
        });
      }
    }
    engine_.finish_gradient(id);
  }

  // Needs no parameters for the embedding's gradient. Unit 0's accumulator has been open since
  // head().
  void embed_backward(std::span<const Batch> batches) {
    const std::span<float> gradient = HostDevice::view(engine_.gradient(kEmbeddingUnit));
    if (divided_) {
      for (std::size_t k = 0; k < batches.size(); ++k)
        divided_->embed_backward(batches[k], space_.stream.back()[k], gradient.data());
      divided_->sum_shared(kEmbeddingUnit, gradient);
    } else {
      regions_.run("embed backward", kBackward, [&](Team& team) {
        for (std::size_t k = 0; k < batches.size(); ++k) {
          const ConstArray dx = space_.stream.back()[k];
          head_.embed_backward(team, batches[k].inputs, shape_.context, dx, dx, gradient.data());
        }
      });
    }
    engine_.finish_gradient(kEmbeddingUnit);
  }

  bool checkpointing() const noexcept {
    return shape_.checkpointing == ActivationCheckpointing::kBlock;
  }

  Engine& engine_;
  WorkerPool& workers_;
  TensorRanks* tensor_;  // null if this rank has the whole model
  Regions regions_;
  ModelConfig model_;
  RunShape shape_;
  DeviceBuffer memory_;
  TrainerSpace space_;
  Block block_;
  Head head_;
  std::optional<TensorPasses> divided_;  // set if tensor-parallel ranks divide the layers
};

void Trainer::Impl::check(std::span<const Batch> batches) const {
  const auto rows = static_cast<std::size_t>(shape_.rows());
  for (const Batch& batch : batches) {
    if (batch.inputs.size() != rows || batch.targets.size() != rows) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("a micro-batch has {} inputs and {} targets, but needs {} of each "
                              "(batch {} x context {})",
                              batch.inputs.size(), batch.targets.size(), rows, shape_.batch,
                              shape_.context));
    }
  }
}

Trainer::Trainer(Engine& engine, HostDevice& device, WorkerPool& workers, const ModelConfig& model,
                 const RunShape& shape, TensorRanks* tensor) {
  check_shape(model, shape);
  ZIGGURAT_CHECK(model.part == (tensor ? tensor->part() : TensorPart{}),
                 "part {} of {} of a model, and other ranks to go with it", model.part.rank,
                 model.part.ranks);
  impl_ = std::make_unique<Impl>(engine, device, workers, model, shape, tensor);
}

Trainer::~Trainer() = default;

std::uint64_t Trainer::workspace_bytes(const ModelConfig& model, const RunShape& shape,
                                       std::size_t threads) {
  check_shape(model, shape);
  Carver carver(nullptr);
  TrainerSpace::carve(model, shape, threads, carver);
  return carver.used_bytes();
}

TrainerNeed Trainer::need(const ModelConfig& model, const RunShape& shape, std::size_t threads) {
  return {.device_bytes = workspace_bytes(model, shape, threads), .held = {kEmbeddingUnit}};
}

double Trainer::forward_backward(std::span<const Batch> micro_batches, float loss_scale) {
  if (micro_batches.size() != static_cast<std::size_t>(impl_->shape().accumulate)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} micro-batches were given, but a step has {}", micro_batches.size(),
                            impl_->shape().accumulate));
  }
  impl_->check(micro_batches);
  return impl_->forward_backward(micro_batches, loss_scale);
}

double Trainer::evaluate(std::span<const Batch> micro_batches) {
  if (micro_batches.empty())
    throw Error(ErrorCode::kInvalidArgument,
                "there is no micro-batch to evaluate: give one or more");
  impl_->check(micro_batches);
  return impl_->evaluate(micro_batches);
}

std::string Trainer::sample(const std::string& prompt, const SampleOptions& options) {
  return impl_->sample(prompt, options);
}

ComputeSeconds Trainer::compute_seconds() const noexcept { return impl_->seconds(); }

std::string numerics_fingerprint() { return matmul_fingerprint(); }

}  // namespace ziggurat::gpt
