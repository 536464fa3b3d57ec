// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/sampler.cc: forward over a window, and a draw from its last row.
#include "integrations/gpt/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "integrations/gpt/random.h"

namespace ziggurat::gpt {
namespace {

// Windows are padded to a multiple of this, so that few shapes are built. What follows a row never
// changes it (causal).
constexpr std::int64_t kWindowStep = 64;

// Compute for windows of one length.
struct Window {
  Window(const ModelConfig& model, std::int64_t length, std::size_t workers)
      : block(model, {.batch = 1, .context = length}, workers),
        head(model, RowShare::whole(length), workers) {}
  Block block;
  Head head;
};

// The byte with the largest logit / temperature + Gumbel noise: a draw from their softmax without
// an exp.
std::uint8_t draw(std::span<const float> logits, float temperature, std::uint64_t key) {
  std::size_t best = 0;
  double best_score = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    double score = static_cast<double>(logits[i]);
    if (temperature > 0) {
      const double uniform =
          (static_cast<double>(mix64(key + i) >> 11) + 0.5) * (1.0 / 9007199254740992.0);
      score = score / static_cast<double>(temperature) - portable_log(-portable_log(uniform));
    }
    if (i == 0 || score > best_score) {
      best = i;
      best_score = score;
    }
  }
  return static_cast<std::uint8_t>(best);
}

}  // namespace

std::string sample(Engine& engine, WorkerPool& workers, const ModelConfig& model,
                   const SamplerSpace& space, const std::string& prompt,
                   const SampleOptions& options) {
  if (prompt.empty()) throw Error(ErrorCode::kInvalidArgument, "prompt: at least one byte");
  if (options.count < 0)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("count {}: at least 0", options.count));
  if (!(options.temperature >= 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("temperature {}: at least 0", options.temperature));
  }
  std::map<std::int64_t, Window> windows;
  std::string text = prompt;
  for (std::int64_t i = 0; i < options.count; ++i) {
    const auto length =
        std::min<std::int64_t>(static_cast<std::int64_t>(text.size()), space.context);
    const std::int64_t padded =
        std::min(space.context, (length + kWindowStep - 1) / kWindowStep * kWindowStep);
    const Window& window =
        windows.try_emplace(padded, model, padded, workers.threads()).first->second;
    std::vector<std::uint8_t> tokens(text.end() - length, text.end());
    tokens.resize(static_cast<std::size_t>(padded), 0);

    Array x = space.x;
    Array y = space.y;
    for (UnitId unit = 0; unit <= model.layers; ++unit) {
      const ConstArray params = engine.acquire(unit);
      workers.run_team(
          [&](Team& team) {
            if (unit == kEmbeddingUnit) {
              window.head.embed(team, params, tokens, padded, x);
            } else {
              window.block.forward(team, space.scratch,
                                   {.params = params,
                                    .x = x,
                                    .activations = space.activations,
                                    .keep = Block::Keep::kNothing,
                                    .y = y});
            }
          },
          "sample");
      engine.release(unit);
      if (unit != kEmbeddingUnit) std::swap(x, y);
    }
    const ConstArray params = engine.acquire(kEmbeddingUnit);
    workers.run_team(
        [&](Team& team) {
          window.head.norm(team, params, x, space.head);
          window.head.logits(team, space.scratch, params, space.head);
        },
        "sample");
    engine.release(kEmbeddingUnit);

    const std::span<const float> logits(space.head.logits + (length - 1) * model.vocabulary,
                                        static_cast<std::size_t>(model.vocabulary));
    const std::uint8_t byte = draw(logits, options.temperature,
                                   mix64(mix64(options.seed) ^ static_cast<std::uint64_t>(i)));
    text.push_back(static_cast<char>(byte));
    if (options.on_byte) options.on_byte(static_cast<char>(byte));
  }
  return text;
}

}  // namespace ziggurat::gpt
