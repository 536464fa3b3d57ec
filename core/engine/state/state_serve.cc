// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_serve.cc: the pieces that other ranks have, and their state.
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {

std::vector<RankPiece> TrainingState::own_pieces() const {
  std::vector<RankPiece> pieces;
  for (const UnitSpec& unit : model_.units) {
    for (const ParamSpec& param : unit.params) {
      if (!param.stored()) continue;
      if (*param.lent >= pieces.size()) pieces.resize(*param.lent + std::size_t{1});
      pieces[*param.lent] = {.name = param.name, .count = param.count()};
    }
  }
  return pieces;
}

std::unique_ptr<StateService> TrainingState::make_service() {
  StateService::Served served{
      .pieces = own_pieces(),
      .read = [this](std::uint64_t piece, std::uint64_t state,
                     const StateService::Give& give) { return serve_state(piece, state, give); },
      .closed = [this](int rank, const StateService::Begun& begun) { rank_closed(rank, begun); }};
  return std::make_unique<StateService>(cancel_, runtime_.reactor, *runtime_.ranks,
                                        std::move(served));
}

/// The pieces are kept, because they are needed for each array of each
/// piece.
const TrainingState::Pieces& TrainingState::known_pieces(int rank) const {
  if (const auto known = pieces_.find(rank); known != pieces_.end()) return known->second;
  if (!service_ && rank != 0)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("rank {} does not exist, because there is only one rank: give 0", rank));
  std::vector<RankPiece> all = service_ ? service_->pieces_of(rank) : own_pieces();
  Pieces& its = pieces_[rank];
  its.all = std::move(all);
  for (std::size_t i = 0; i < its.all.size(); ++i) its.places.emplace(its.all[i].name, i);
  return its;
}

Task<> TrainingState::read_state_of(int rank, std::uint64_t piece, std::size_t state,
                                    std::span<float> values) {
  cancel_.check();
  co_await service_->read(rank, piece, state, generation_, values);
}

/// Gives the state of one of this rank's pieces to another rank.
Task<> TrainingState::serve_state(std::uint64_t piece, std::uint64_t state,
                                  const StateService::Give& give) {
  cancel_.check();
  const auto param = static_cast<ParamId>(piece);
  // Its trainer may go on meanwhile.
  const UnitUses::Use reading = co_await uses_.read(lent_places_[param].unit);
  for (const ChunkRun& its : lent_runs(param)) {
    std::vector<float> values(its.run.count);
    co_await read_run(its.chunk, state, its.run, values);
    co_await give(values);
  }
}

/// Ends the run if this rank waits for a step or a checkpoint that the closed rank has not come to,
/// and so will never make.
void TrainingState::rank_closed(int rank, const StateService::Begun& begun) {
  const bool waits = agreeing_ && begun_.calls > begun.calls;
  const bool stores = storing_ && begun_.checkpoints > begun.checkpoints;
  if (!waits && !stores) return;
  fail(std::make_exception_ptr(
      Error(ErrorCode::kUnavailable,
            fmt::format("rank {} has closed its engine, but rank {} waits for it after step {}: "
                        "make the same calls on every rank",
                        rank, runtime_.ranks->rank(), generation_))));
}

void TrainingState::require_all_open(const char* call) {
  const int rank = service_ ? service_->closed_rank() : -1;
  if (rank < 0) return;
  const Error error(
      ErrorCode::kUnavailable,
      fmt::format("{}: rank {} has closed its engine, but every rank must take part", call, rank));
  fail(std::make_exception_ptr(error));
  throw error;
}

}  // namespace ziggurat
