// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/answer.cc: does it fit, with what, how long is a step.
#include <fmt/format.h>

#include <algorithm>

#include "core/plan/strategies/compare.h"
#include "core/plan/strategies/words.h"

namespace ziggurat {
namespace {

std::string where_of(const Job& job) {
  if (job.machine.one_memory) return job.machine.name;
  return fmt::format("{} GPU{} of {}", grouped(job.gpus), job.gpus == 1 ? "" : "s",
                     job.machine.name);
}

/// Returns where it trains and with what.
std::string on_what(const Job& job, const Verdict& best) {
  if (best.training.layout.ranks() > 1 || best.offloads())
    return fmt::format("{} with {}", where_of(job), best.name);
  if (job.machine.one_memory) return where_of(job) + " undivided";
  return fmt::format("one GPU of {}, without offload", job.machine.name);
}

/// Returns what beside the layout it takes, as a clause.
std::string how(const Training& training) {
  std::string said;
  if (training.recompute == Recompute::kSelective) said += ", with selective recomputation";
  if (training.recompute == Recompute::kFull)
    said += ", with each layer computed again in backward";
  if (training.software.loss_tokens > 0) said += ", the loss in chunks";
  if (training.offloads_activations) said += ", inputs of layers in host memory";
  return said;
}

/// Returns the verdict that lacks least; none if all are refused.
const Verdict* nearest(const Comparison& comparison) {
  const Verdict* found = nullptr;
  for (const Verdict& one : comparison.verdicts) {
    if (!one.refusal.empty()) continue;
    if (found == nullptr || one.needs.front().share() < found->needs.front().share()) found = &one;
  }
  return found;
}

std::string does_not_fit(const Job& job, const Comparison& comparison) {
  std::string said = fmt::format(
      "It does not fit: {} cannot be trained on {} with any strategy that is known here.",
      job.model.name, where_of(job));
  const Verdict* const one = nearest(comparison);
  if (one == nullptr)
    return said + fmt::format(" Each is refused: {}.", comparison.verdicts.front().refusal);
  said += fmt::format(" {} comes nearest ({}).", one->name, one->breaks_first());
  if (comparison.fewest > job.gpus)
    said += fmt::format(" On {} such GPUs FSDP2 works.", grouped(comparison.fewest));
  return said;
}

std::string of_asked(const Verdict& asked) {
  if (!asked.refusal.empty()) return fmt::format("What you ask for is refused: {}.", asked.refusal);
  if (!asked.fits()) return fmt::format("What you ask for does not fit: {}.", asked.breaks_first());
  return fmt::format("What you ask for fits{}, and a step takes {:.3g} s ({}).",
                     how(asked.training), asked.time.seconds, asked.breaks_first());
}

}  // namespace

std::string answer(const Job& job, const Comparison& comparison) {
  std::string said;
  if (comparison.asked) said = of_asked(comparison.verdicts[*comparison.asked]) + " ";
  if (!comparison.best) return said + does_not_fit(job, comparison);
  const Verdict& best = comparison.verdicts[*comparison.best];
  if (comparison.asked == comparison.best) return said + "Nothing better is known here.";
  const double tokens = static_cast<double>(job.sequence) * static_cast<double>(job.micro_batch) *
                        static_cast<double>(job.micro_batches) * job.gpus;
  const TierNeed* const tight = best.barely_fits();
  const char* const verdict = comparison.asked ? "Recommended" : "It fits";
  said += fmt::format(
      "{}{}: {} trains on {}{}. A step of {} tokens takes {:.3g} s by this estimate, "
      "which is {} tokens a second; times compare strategies better than machines.",
      verdict,
      tight == nullptr   ? ""
      : comparison.asked ? ", though it barely fits"
                         : ", but barely",
      job.model.name, on_what(job, best), how(best.training),
      grouped(static_cast<std::int64_t>(tokens)), best.time.seconds,
      about(tokens / best.time.seconds));
  if (tight == nullptr) return said;
  return said + fmt::format(
                    " It may run out: {} is {:.0f} % full, and estimates of it were off by up "
                    "to {:.0f} %.",
                    name_of(tight->tier), 100 * tight->share(), 100 * kMemoryWorstError);
}

}  // namespace ziggurat
