// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/deepspeed_defaults.cc: the values that DeepSpeed uses for absent keys.
#include "integrations/deepspeed/deepspeed_keys.h"

namespace ziggurat {
namespace {

constexpr DeepSpeedDefault kDefaults[] = {
    {"gradient_clipping", "clip", "1.0"},
    {"zero_optimization.stage", "zero_stage", "0"},
    {"zero_optimization.reduce_bucket_size", "reduce_bucket_size", "500000000"},
    {"zero_optimization.prefetch_bucket_size", "prefetch_bucket_size", "50000000"},
    {"zero_optimization.max_live_parameters", "max_live_parameters", "1000000000"},
    {"zero_optimization.max_reuse_distance", "max_reuse_distance", "1000000000"},
    {"zero_optimization.param_persistence_threshold", "param_persistence_threshold", "100000"},
};

constexpr DeepSpeedDefault kAdamDefaults[] = {
    {"optimizer.params.lr", "lr", "0.001"},
    {"optimizer.params.betas", "betas", "[0.9, 0.999]"},
    {"optimizer.params.eps", "eps", "1e-8"},
    {"optimizer.params.weight_decay", "weight_decay", "0"},
};
constexpr DeepSpeedDefault kLionDefaults[] = {
    {"optimizer.params.lr", "lr", "0.001"},
    {"optimizer.params.betas", "betas", "[0.9, 0.999]"},
    {"optimizer.params.weight_decay", "weight_decay", "0"},
};
constexpr DeepSpeedDefault kAdagradDefaults[] = {
    {"optimizer.params.lr", "lr", "0.01"},
    {"optimizer.params.eps", "eps", "1e-10"},
    {"optimizer.params.weight_decay", "weight_decay", "0"},
};
constexpr DeepSpeedDefault kSgdDefaults[] = {
    {"optimizer.params.lr", "lr", "0.001"},
    {"optimizer.params.momentum", "betas", "[0, 0.999]"},
    {"optimizer.params.weight_decay", "weight_decay", "0"},
};

constexpr DeepSpeedDefault kLossScaleDefaults[] = {
    {"fp16.loss_scale", "loss_scale", "0"},
    {"fp16.initial_scale_power", "initial_scale_power", "16"},
    {"fp16.loss_scale_window", "loss_scale_window", "1000"},
    {"fp16.hysteresis", "hysteresis", "2"},
    {"fp16.consecutive_hysteresis", "consecutive_hysteresis", "false"},
    {"fp16.min_loss_scale", "min_loss_scale", "1"},
};

}  // namespace

std::span<const DeepSpeedDefault> deepspeed_defaults() { return kDefaults; }

std::span<const DeepSpeedDefault> deepspeed_optimizer_defaults(std::string_view optimizer) {
  if (optimizer == "lion") return kLionDefaults;
  if (optimizer == "adagrad") return kAdagradDefaults;
  if (optimizer == "sgd") return kSgdDefaults;
  if (optimizer == "adam" || optimizer == "adamw") return kAdamDefaults;
  return {};
}

std::span<const DeepSpeedDefault> deepspeed_loss_scale_defaults() { return kLossScaleDefaults; }

}  // namespace ziggurat
