// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/activations.cc: the terms of activations.h.
#include "core/plan/strategies/activations.h"

#include <algorithm>

namespace ziggurat {
namespace {

struct Widths {
  double hidden, query, key, value, attended, heads, ffn;
  double tp;      ///< divides heads and f
  double rows;    ///< divides the rows of norms and dropouts
  double tokens;  ///< of the micro-batch
};

Widths widths_of(const Training& training, bool experts) {
  const ModelShape& model = training.model;
  const auto tp = static_cast<double>(training.layout.tp);
  return {.hidden = static_cast<double>(model.hidden),
          .query = static_cast<double>(model.query_width()),
          .key = static_cast<double>(model.key_width()),
          .value = static_cast<double>(model.value_width()),
          .attended = static_cast<double>(model.attended_width()),
          .heads = static_cast<double>(model.heads),
          .ffn = static_cast<double>(experts ? model.experts.ffn : model.ffn),
          .tp = tp,
          .rows = training.layout.sequence_parallel ? tp : 1,
          .tokens = static_cast<double>(training.tokens())};
}

double attention_saved(const Training& training, const Widths& w) {
  const Software& software = training.software;
  const double norm = 4 * w.query + 4 * w.key;  // q and k in fp32, before their norm
  double bytes = 2 * (w.query + w.key + w.value + w.attended);
  if (training.model.qk_norms) bytes += 2 * (w.query + w.key) + (software.norms_in_fp32 ? norm : 0);
  const bool scores = !software.flash && training.recompute != Recompute::kSelective;
  const double sequence = static_cast<double>(training.sequence);
  bytes +=
      scores ? (software.dropout ? 5 : 2) * w.heads * sequence : (software.flash ? 4 * w.heads : 0);
  return bytes / w.tp;
}

/// Without scores, selective recomputation is of what needs no product.
bool remakes_passes(const Training& training) {
  return training.recompute == Recompute::kSelective && training.software.flash;
}

double mlp_saved(const Training& training, const Widths& w, bool experts) {
  const double each = (training.model.gated ? 6 : 4) - (remakes_passes(training) ? 2 : 0);
  if (!experts) return each * w.ffn / w.tp;
  const Experts& of = training.model.experts;
  const double combined = training.software.experts_in_fp32 ? 8 * w.hidden : 0;
  return static_cast<double>(of.per_token) * (4 * w.hidden + combined + each * w.ffn) / w.tp +
         each * static_cast<double>(of.shared_ffn) / w.tp;
}

}  // namespace

double saved_bytes(const Training& training, bool experts) {
  const Widths w = widths_of(training, experts);
  const double norms = 2 * (training.software.norms_in_fp32 ? 4 : 2) * w.hidden +
                       (remakes_passes(training) ? 0 : 4 * w.hidden);
  const double masks = training.software.dropout ? 2 * w.hidden : 0;
  // The inputs of q, k, v and of the MLP are the norms' outputs. Sequence parallelism gathers them
  // again in backward, so that they are divided too (Korthikanti et al., section 4.2.2).
  return w.tokens * ((norms + masks) / w.rows + attention_saved(training, w) +
                     mlp_saved(training, w, experts));
}

double needed_bytes(const Training& training, bool experts) {
  Training whole = training;
  whole.recompute = Recompute::kNothing;
  return saved_bytes(whole, experts);
}

double gradient_bytes(const Training& training, bool experts) {
  const Widths w = widths_of(training, experts);
  const double each = training.model.gated ? 6 : 4;
  // A norm in fp32 has the gradients of its output and of its input in fp32.
  double bytes = (training.software.norms_in_fp32 ? 10 : 2) * w.hidden / w.rows;
  if (!experts) return w.tokens * (bytes + each * w.ffn / w.tp);
  const double combined = training.software.experts_in_fp32 ? 8 * w.hidden : 0;
  bytes += static_cast<double>(training.model.experts.per_token) *
           (2 * w.hidden + combined + each * w.ffn) / w.tp;
  return w.tokens * bytes;
}

double input_bytes(const Training& training) {
  const Widths w = widths_of(training, false);
  return 2 * w.hidden * w.tokens / w.rows;
}

double layers_in_flight(const Training& training) {
  const ParallelLayout& layout = training.layout;
  const double pp = layout.pp;
  const double chunks = std::max(1, layout.pipeline_chunks);
  const double held = std::min(static_cast<double>(training.micro_batches), pp);
  const double interleaved = chunks > 1 ? 1 + (pp - 1) / (pp * chunks) : 1;
  return static_cast<double>(layout.layers_of_a_rank(training.model.layers)) * held * interleaved;
}

double loss_bytes(const Training& training) {
  const auto all = static_cast<double>(training.tokens());
  const auto chunk = static_cast<double>(training.software.loss_tokens);
  const double tokens = chunk > 0 ? std::min(all, chunk) : all;
  return training.software.loss_bytes * tokens * static_cast<double>(training.model.vocabulary) /
         training.layout.tp;
}

}  // namespace ziggurat
