// SPDX-License-Identifier: Apache-2.0
// core/plan/auto_ways.h: what each way to place a run's state takes, for auto_choice.h: of a
// trainer on Engine, by the plan of its run, and of a trainer that lends its gradients and computes
// with units that the engine brings (LentEngine, offload() of the Python package).
//
// The least of each part is counted as the engine divides it when it opens (run_plan.h,
// host_plan.h). What a step moves is counted from the chunk table: parameters for forward and for
// backward, gradients to and from a drive, records. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/plan/auto_choice.h"
#include "core/plan/run_plan.h"

namespace ziggurat {

/// The share of the free memory that a run takes whose activations are counted. The rest is the
/// system's, the data's and the program's own.
inline constexpr double kCountedShare = 0.9;
/// The share if activations are not known: they, batches and copies of the state have the rest.
inline constexpr double kUncountedShare = 0.75;

/// Returns where parameters and gradients may be placed, best first, with records on NVMe so that
/// each step is durable. Parameters leave a memory last, because a step moves them twice and
/// gradients only once.
std::span<const Placement> automatic_placements();

/// Tiles of a chunk with which a sweep of few records at a time is still fast: 1.5 MiB of fp32
/// AdamW's. With less memory than largest chunks need, a store gets smaller ones.
inline constexpr std::uint64_t kComfortableTiles = 8;

/// Whether the least of a part lets a step keep cores and drive busy, or is all that it takes to
/// run.
enum class AutoLeast : std::uint8_t { kComfortable, kBare };

/// Returns the ways for a run: the placement of the request, or all if that is automatic. The
/// budgets of the request are ignored.
std::vector<AutoWay> run_ways(RunRequest request, AutoLeast least);

/// What was chosen for a run, and what it then holds.
struct RunChoice {
  AutoChoice choice;
  RunPlan plan;     ///< with the chosen placement and budgets
  std::string why;  ///< one line
};

/// Chooses what `request` leaves open: its placement if that is automatic, and budgets that are 0.
/// `room` says what memory there is; budgets that are given count as taken. Errors:
/// kResourceExhausted.
RunChoice choose_run(RunRequest request, AutoRoom room, const MovingSpeeds& speeds);

/// Units that a trainer brings to host memory, and what is beside them on one rank.
struct UnitsRequest {
  ModelSpec model;  ///< a unit for each parameter, as LentEngine::open() is given it
  StateKind state{};
  std::uint64_t units_least_bytes = 0;  ///< with which each runs while the next one is brought
  std::uint64_t units_all_bytes = 0;    ///< with which all are there at once
  std::uint64_t brought_bytes = 0;      ///< of all units, as a pass brings them
  bool live_there = true;            ///< parameters that all fit are kept where they are used, once
  std::uint64_t gradient_bytes = 0;  ///< of a step, in the trainer's memory
  std::uint64_t beside_bytes = 0;    ///< in the trainer's memory whatever is chosen
  /// Bytes of parameters that are used where they are kept, which is the drive if those of units
  /// are there. If it is: what a step reads and writes there, and which of the gradients are there
  /// too.
  std::uint64_t in_place_bytes = 0, in_place_moved_bytes = 0, in_place_gradient_bytes = 0;
  bool has_store = false;    ///< there is a directory for what is placed on NVMe
  bool needs_store = false;  ///< the optimizer's state must be there
  bool has_folder = false;   ///< there is one for parameters and gradients of a state in memory
  /// What is given by hand; the tier of parameters is kHost where they may live in units too.
  std::optional<Tier> params{}, grads{}, optimizer{};
};

/// Returns the ways that the request leaves open.
std::vector<AutoWay> unit_ways(const UnitsRequest& request, AutoLeast least);

struct UnitsChoice {
  AutoChoice choice;
  std::string why;
};

/// Chooses what `request` and `room` leave open. Errors: kInvalidArgument if a directory is missing
/// for what is given by hand; kResourceExhausted.
UnitsChoice choose_units(const UnitsRequest& request, AutoRoom room, const MovingSpeeds& speeds);

}  // namespace ziggurat
