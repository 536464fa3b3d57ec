// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/sampler.cc: runs forward over a window, and draws a byte from its last row.
#include "integrations/gpt/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "integrations/gpt/random.h"
#include "integrations/gpt/tensor_passes.h"

namespace ziggurat::gpt {
namespace {

// Windows are padded to a multiple of this length, so that few shapes are built. Rows that follow
// never change a row, because attention is causal.
constexpr std::int64_t kWindowStep = 64;

// Computes windows of one length.
class Window {
 public:
  Window(const ModelConfig& model, std::int64_t length, std::size_t threads,
         const SamplerSpace& space)
      : space_(space),
        length_(length),
        block_(model, {.batch = 1, .context = length}, threads),
        head_(model, RowShare::whole(length), threads) {
    const RunShape shape{.batch = 1, .accumulate = 1, .context = length};
    if (space.tensor)
      divided_.emplace(model, shape, block_, head_, space.trainer, space.regions, *space.tensor);
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  void embed(ConstArray params, const Batch& tokens, Array x) {
    if (divided_) return divided_->embed(params, tokens, x);
    run([&](Team& team) { head_.embed(team, params, tokens.inputs, length_, x); });
  }
  void forward(const Block::Forward& pass) {
    if (divided_) return divided_->forward(pass, &ComputeSeconds::forward);
    run([&](Team& team) { block_.forward(team, space_.trainer.scratch, pass); });
  }
  void logits(ConstArray params, Array x) {
    if (divided_) return divided_->logits(params, x);
    run([&](Team& team) {
      head_.norm(team, params, x, space_.trainer.head);
      head_.logits(team, space_.trainer.scratch, params, space_.trainer.head);
    });
  }

 private:
  void run(const std::function<void(Team&)>& region) {
    space_.regions.run("sample", &ComputeSeconds::forward, region);
  }

  const SamplerSpace& space_;
  std::int64_t length_;
  Block block_;
  Head head_;
  std::optional<TensorPasses> divided_;
};

// Returns the logits of one row, over all parts of the vocabulary.
std::vector<float> logits_of(std::int64_t row, const ModelConfig& model,
                             const SamplerSpace& space) {
  std::vector<float> logits(static_cast<std::size_t>(model.vocabulary));
  const std::int64_t part = model.part_vocabulary();
  std::copy_n(space.trainer.head.logits + row * part, part, &logits[model.first_token()]);
  if (space.tensor) space.tensor->gather(std::as_writable_bytes(std::span(logits)));
  return logits;
}

// Returns the byte with the largest logit / temperature + Gumbel noise, which is a draw from the
// softmax without any exp.
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

std::string sample(Engine& engine, std::size_t threads, const ModelConfig& model,
                   const SamplerSpace& space, const std::string& prompt,
                   const SampleOptions& options) {
  if (prompt.empty())
    throw Error(ErrorCode::kInvalidArgument, "the prompt is empty: give at least one byte");
  if (options.count < 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("count {} must be at least 0", options.count));
  if (!(options.temperature >= 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("temperature {} must be 0 or more", options.temperature));
  }
  std::map<std::int64_t, Window> windows;
  std::string text = prompt;
  for (std::int64_t i = 0; i < options.count; ++i) {
    const auto length =
        std::min<std::int64_t>(static_cast<std::int64_t>(text.size()), space.context);
    const std::int64_t padded =
        std::min(space.context, (length + kWindowStep - 1) / kWindowStep * kWindowStep);
    Window& window = windows.try_emplace(padded, model, padded, threads, space).first->second;
    Batch tokens;
    tokens.inputs.assign(text.end() - length, text.end());
    tokens.inputs.resize(static_cast<std::size_t>(padded), 0);

    Array x = space.trainer.stream[0][0];
    Array y = space.trainer.stream[1][0];
    for (UnitId unit = 0; unit <= model.layers; ++unit) {
      const ConstArray params = HostDevice::view(engine.acquire(unit));
      if (unit == kEmbeddingUnit) {
        window.embed(params, tokens, x);
      } else {
        window.forward({.params = params,
                        .x = x,
                        .activations = space.trainer.activations[0][0],
                        .keep = Block::Keep::kNothing,
                        .y = y,
                        .partial = space.trainer.d_rows});
        std::swap(x, y);
      }
      engine.release(unit);
    }
    const ConstArray params = HostDevice::view(engine.acquire(kEmbeddingUnit));
    window.logits(params, x);
    engine.release(kEmbeddingUnit);

    const std::vector<float> logits = logits_of(length - 1, model, space);
    const std::uint8_t byte = draw(logits, options.temperature,
                                   mix64(mix64(options.seed) ^ static_cast<std::uint64_t>(i)));
    text.push_back(static_cast<char>(byte));
    if (options.on_byte) options.on_byte(static_cast<char>(byte));
  }
  return text;
}

}  // namespace ziggurat::gpt
