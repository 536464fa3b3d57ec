// SPDX-License-Identifier: Apache-2.0
// tests/faults/struck_jobs.h: what campaigns of jobs that are struck have in common: at which
// calls, and what a job that saves must have left.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/faults/checkpoint_judge.h"
#include "tests/faults/rank_jobs.h"

namespace ziggurat::testing {

/// Strikes calls of the rank of `strike`, of which a sound run makes about calls[rank], as
/// for_each_call() chooses them, until something fails. `strike_at` says whether the call was made.
/// How many were struck: at least one must be.
std::uint64_t strike_calls(Strike strike, const std::vector<std::uint64_t>& calls,
                           std::uint64_t usual,
                           const std::function<bool(const Strike&)>& strike_at);

/// The rank that was struck ended by SIGKILL.
void expect_killed(const std::vector<RankReport>& ranks, const Strike& strike);

/// Runs `job`, saving every step; none where that fails. Its files are left.
States states_of_steps(Job job);

/// What a job that was struck left in its target keeps every promise that it made.
void expect_kept(const Job& job, const States& expected, const std::vector<RankReport>& ranks);

/// `next` goes on from what `ranks`, the job before it, were promised, with its bits, and leaves
/// nothing of that job's.
void expect_next_goes_on(const Job& next, const States& expected,
                         const std::vector<RankReport>& ranks);

}  // namespace ziggurat::testing
