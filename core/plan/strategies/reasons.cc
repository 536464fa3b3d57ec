// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/reasons.cc: the reason that singles out the choice, and remedies that were
// tried.
#include "core/plan/strategies/reasons.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/plan/strategies/words.h"

namespace ziggurat {
namespace {

constexpr double kPercent = (kNearlyAsFast - 1) * 100;

/// Says by what a step of `slower` is longer most.
std::string most_of_difference(const Verdict& slower, const Verdict& faster) {
  double most = 0;
  std::string what;
  for (const TimeLine& line : slower.time.lines) {
    double more = line.seconds;
    for (const TimeLine& other : faster.time.lines)
      more -= other.what == line.what ? other.seconds : 0;
    if (more <= most) continue;
    most = more;
    what = line.what;
  }
  return what.empty() ? "" : fmt::format(", mostly by the line \"{}\"", what);
}

/// Says of each other strategy that offloads why it is not the one.
std::string of_rivals(const Comparison& comparison, const Verdict& best) {
  std::vector<std::string> said;
  for (const Verdict& one : comparison.verdicts) {
    if (&one == &best || !one.refusal.empty() || !one.offloads()) continue;
    if (!one.fits()) {
      said.push_back(fmt::format("{} does not fit {}", one.name, name_of(one.needs.front().tier)));
    } else if (one.time.seconds > best.time.seconds) {
      said.push_back(fmt::format("{} takes {:.2g} times as long{}", one.name,
                                 one.time.seconds / best.time.seconds,
                                 most_of_difference(one, best)));
    } else {
      said.push_back(fmt::format("{} is not faster by more than {:.0f} %, and stands later",
                                 one.name, kPercent));
    }
  }
  return said.empty() ? "" : fmt::format(" Of the others that offload, {}.", fmt::join(said, "; "));
}

/// Names the fastest strategy that offloads, if it would be faster than one that need not.
std::string of_faster_offload(const Comparison& comparison, const Verdict& best) {
  const Verdict* fastest = nullptr;
  for (const Verdict& one : comparison.verdicts) {
    if (!one.fits() || !one.offloads()) continue;
    if (fastest == nullptr || one.time.seconds < fastest->time.seconds) fastest = &one;
  }
  if (best.offloads() || fastest == nullptr ||
      fastest->time.seconds * kNearlyAsFast >= best.time.seconds)
    return "";
  return fmt::format(
      " By this estimate {} would take {:.2g} of its time; but times of offload were not compared "
      "with runs: measure a step of both before you prefer it.",
      fastest->name, fastest->time.seconds / best.time.seconds);
}

bool is_plain_fsdp(const Verdict& one) {
  const ParallelLayout& layout = one.training.layout;
  return one.system == System::kPyTorch && !one.offloads() && layout.stage == 3 && layout.ep == 1 &&
         layout.shard_group == 0 && !layout.keeps_gathered;
}

/// Says why it takes what the layout does beyond the simplest one.
std::string of_layout(const Comparison& comparison, const Verdict& best) {
  const ParallelLayout& layout = best.training.layout;
  if (best.offloads()) return "";
  if (layout.stage == 0 && layout.tp == 1 && layout.pp == 1) return "nothing needs to be divided";
  if (is_plain_fsdp(best)) return "FSDP2 is the default where the state must be divided";
  const auto plain = std::ranges::find_if(comparison.verdicts, is_plain_fsdp);
  if (layout.ep == 1 || plain == comparison.verdicts.end() || plain->fits()) return "";
  return fmt::format(
      "plain FSDP2, where each GPU gathers all experts of a layer, does not fit ({}), while here "
      "{} "
      "GPUs of a node share them",
      plain->breaks_first(), layout.ep);
}

/// Says why it is this one of those that need offload, or of those that do not.
std::string of_rank(const Comparison& comparison, const Verdict& best) {
  const char* const with = best.offloads() ? "with" : "without";
  const Verdict* simplest = nullptr;
  int fitting = 0;
  for (const Verdict& one : comparison.verdicts) {
    if (!one.fits() || one.offloads() != best.offloads()) continue;
    if (simplest == nullptr) simplest = &one;
    ++fitting;
  }
  if (fitting == 1) return fmt::format("nothing else fits {} it", with);
  if (simplest == &best)
    return fmt::format(
        "of what fits {} it, this is the simplest and nothing is faster by more than "
        "{:.0f} %",
        with, kPercent);
  return fmt::format("it is faster by more than {:.0f} % than {}, the simplest that fits {} it",
                     kPercent, simplest->name, with);
}

std::string of_choice(const Job& job, const Comparison& comparison, const Verdict& best) {
  if (comparison.asked == comparison.best)
    return fmt::format(
        "Keep what you ask for: nothing as simple that fits is faster by more than {:.0f} %.",
        kPercent);
  std::vector<std::string> said;
  if (std::string layout = of_layout(comparison, best); !layout.empty())
    said.push_back(std::move(layout));
  said.push_back(best.offloads()
                     ? fmt::format("nothing without offload fits {}",
                                   job.gpus == 1 ? fmt::format("this {}", device_word(job.machine))
                                                 : "these GPUs")
                     : "you do not need offload");
  said.push_back(of_rank(comparison, best));
  return fmt::format("Begin with {}: {}.{}", best.name, fmt::join(said, "; "),
                     best.offloads() ? of_rivals(comparison, best) : "");
}

std::string of_second(const Comparison& comparison) {
  if (!comparison.second) return " There is no second choice: nothing else fits.";
  return fmt::format(" The second choice is {}.", comparison.verdicts[*comparison.second].name);
}

/// Returns how much more memory a node must have, and for which strategy, where GPUs have enough;
/// empty if they have not.
std::string more_memory(const Job& job, const Comparison& comparison) {
  double least = std::numeric_limits<double>::infinity();
  std::string said;
  for (const Verdict& one : comparison.verdicts) {
    if (!one.refusal.empty()) continue;
    double lacking = 0;
    std::vector<std::string> more;
    for (const TierNeed& need : one.needs) {
      if (need.fits()) continue;
      const bool host = need.tier == Tier::kHost;
      const double bytes =
          host ? need.bytes / kHostShare - job.machine.host_bytes : need.bytes - need.room;
      lacking += need.tier == Tier::kDevice ? least : bytes;
      more.push_back(
          fmt::format("{} more {}", whole_gb(bytes), host ? "host memory" : "of drives"));
    }
    if (lacking >= least) continue;
    least = lacking;
    said = fmt::format("{} in a node (for {})", fmt::join(more, " and "), one.name);
  }
  return said;
}

bool something_fits(const Job& job) { return compare(job).best.has_value(); }

/// Returns the longest sequences that fit, of halves of what is asked; 0 if none does.
std::int64_t shorter_sequence(Job job) {
  constexpr std::int64_t kShortest = 512;
  job.micro_batch = 1;
  for (job.sequence /= 2; job.sequence >= kShortest; job.sequence /= 2)
    if (something_fits(job)) return job.sequence;
  return 0;
}

}  // namespace

std::string reason(const Job& job, const Comparison& comparison) {
  const Verdict& best = comparison.verdicts[*comparison.best];
  return of_choice(job, comparison, best) + of_second(comparison) +
         of_faster_offload(comparison, best);
}

std::string remedy(const Job& job, const Comparison& comparison) {
  std::vector<std::string> helps, in_vain;
  const auto tried = [&](std::string what, bool fits) {
    (fits ? helps : in_vain).push_back(std::move(what));
  };
  if (job.lora.rank == 0) {
    Job adapted = job;
    adapted.lora.rank = 16;
    tried("LoRA (of rank 16)", something_fits(adapted));
  }
  Job small = job;
  small.recipe.moments = 2;
  tried("moments of 8 bits each", something_fits(small));
  const std::int64_t shorter = shorter_sequence(job);
  tried(shorter > 0 ? fmt::format("sequences of {} tokens, one at a time", grouped(shorter))
                    : "shorter sequences",
        shorter > 0);
  if (comparison.fewest > job.gpus)
    tried(fmt::format("{} GPUs (FSDP2)", grouped(comparison.fewest)), true);
  if (std::string more = more_memory(job, comparison); !more.empty()) tried(std::move(more), true);
  std::string said = "Nothing that is known here fits as it is asked.";
  if (!helps.empty()) said += fmt::format(" It would fit with {}.", fmt::join(helps, ", or with "));
  if (!in_vain.empty())
    said += fmt::format(" Not enough by themselves: {}.", fmt::join(in_vain, ", "));
  return said;
}

}  // namespace ziggurat
