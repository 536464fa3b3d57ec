// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_reshard.cc: reads the whole tensors of the old store, and of each the
// pieces that this rank has now.
#include "core/engine/lent/lent_reshard.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/numerics/typed_value.h"
#include "core/checkpoint/joined_state.h"
#include "core/checkpoint/piece_source.h"
#include "core/checkpoint/steps_blob.h"
#include "core/engine/state/reshard_in_place.h"
#include "core/sharding/packing.h"
#include "core/sharding/piece_layout.h"

namespace ziggurat {
namespace {

constexpr const char* kWhat = "`resume=reshard`";
constexpr std::size_t kNamesShown = 8;

/// The old store, as whole tensors, and what this rank takes of it.
class LentReshard {
 public:
  explicit LentReshard(const LentOpening& opening) : opening_(opening), model_(opening.model) {
    for (std::size_t u = 0; u < model_.units.size(); ++u)
      for (ParamSpec& param : model_.units[u].params) param.lent = static_cast<ParamId>(u);
    std::erase_if(model_.units, [](const UnitSpec& unit) { return !unit.stored(); });
  }

  bool fits(StoredState& stored) const;
  void require(StoredState& stored);
  Task<> require_together(Communicator& ranks) const;
  std::unique_ptr<LentEngineImpl> make(const EngineConfig& beside);

 private:
  std::vector<PieceSource::Param> parts() const;
  std::vector<std::byte> blob() const;
  void read_own(std::size_t param, std::uint64_t first, std::span<float> values) const;
  std::string note_of_own() const;

  const LentOpening& opening_;
  ModelSpec model_;  // what is stored, with the trainer's numbers
  std::optional<JoinedState> whole_;
};

/// Whether this rank's file is that of this run: the same ranks, and the same pieces of the same
/// tensors, as far as the store says so.
bool LentReshard::fits(StoredState& stored) const {
  const Communicator& ranks = *opening_.runtime.ranks;
  const StateContent& content = stored.content();
  if (!stored.of_pieces() || content.layout.ranks != ranks.world_size() ||
      content.run_identity != opening_.config.run_identity)
    return false;
  const std::string& layout = stored.layout(ranks.rank());
  try {
    const ModelSpec own = packed_as(model_, layout);
    ChunkTable::from_layout(own, layout, opening_.config.optimizer.state);
    const auto there = places_in(layout, own);
    const auto here = places_of(own);
    return !there || !here || *there == *here;
  } catch (const Error&) {
    return false;
  }
}

void LentReshard::require(StoredState& stored) {
  if (!stored.of_pieces()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the store {} was made by a trainer whose parameters the engine "
                            "keeps, so it cannot be divided for a trainer that lends them: save a "
                            "checkpoint, and load that",
                            kWhat, stored.place()));
  }
  whole_.emplace(stored, kWhat);
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const UnitSpec& unit : whole_->model().units) shapes[unit.name] = unit.params[0].shape;
  for (const UnitSpec& unit : model_.units) {
    const ParamSpec& param = unit.params.front();
    if (!param.whole) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: nothing says which part of which tensor parameter '{}' is: give "
                              "`pieces`",
                              kWhat, param.name));
    }
    require_place(param);
    const WholePlace& place = *param.whole;
    if (place.name.empty()) continue;
    const auto found = shapes.find(place.name);
    if (found == shapes.end()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the store {} has no state of '{}', which this run trains: train "
                              "the parameters that the store was made with, or give another "
                              "`store`",
                              kWhat, stored.place(), place.name));
    }
    if (found->second == place.shape) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: the store {} has '{}' with the shape {}, but this run has it with "
                            "{}: train the parameters that the store was made with, or give "
                            "another `store`",
                            kWhat, stored.place(), place.name, found->second, place.shape));
  }
  // Cuts within blocks of codes are refused here, where the other ranks hear of it.
  const PieceSource cut(*whole_, parts(), {}, {});
}

/// Throws on every rank if the ranks together do not have whole copies of each tensor. Every rank
/// has read the same tensors, in the same order.
Task<> LentReshard::require_together(Communicator& ranks) const {
  const ModelSpec whole = whole_->model();
  std::map<std::string, std::size_t> index;
  for (const UnitSpec& unit : whole.units) index.emplace(unit.name, index.size());
  const std::size_t tensors = whole.units.size();
  std::vector<std::uint64_t> taken(2 * tensors);  // elements, then cover numbers
  for (const UnitSpec& unit : model_.units) {
    const WholePlace& place = *unit.params.front().whole;
    if (place.name.empty()) continue;
    taken[index.at(place.name)] += unit.count();
    taken[tensors + index.at(place.name)] += cover_number(piece_at(place, unit.count()));
  }
  co_await ranks.all_reduce(std::span(taken), Communicator::Op::kSum);
  std::vector<std::string> lacking;
  for (const UnitSpec& unit : whole.units) {
    const std::size_t at = index.at(unit.name);
    WholePlace all;
    all.name = unit.name;
    all.shape = unit.params[0].shape;
    const std::uint64_t copies = taken[at] / unit.count();
    const bool covers = copies > 0 && taken[at] % unit.count() == 0 &&
                        taken[tensors + at] == copies * cover_number(piece_at(all, unit.count()));
    if (!covers) lacking.push_back(unit.name);
  }
  if (lacking.empty()) co_return;
  const std::size_t shown = std::min(lacking.size(), kNamesShown);
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "{}: the store {} has state of '{}'{}, of which this run's ranks do not "
          "train all elements, or train some more often than others: train the parameters that the "
          "store was made with, "
          "or give another `store`",
          kWhat, whole_->place(), fmt::join(std::span(lacking).first(shown), "', '"),
          shown < lacking.size() ? fmt::format(" and {} more", lacking.size() - shown) : ""));
}

std::vector<PieceSource::Param> LentReshard::parts() const {
  std::vector<PieceSource::Param> parts;
  for (const UnitSpec& unit : model_.units) {
    const ParamSpec& param = unit.params.front();
    parts.push_back(
        {.name = param.name, .shape = param.shape, .part = piece_at(*param.whole, param.count())});
  }
  return parts;
}

/// Returns the blob with which this rank's trainer goes on.
std::vector<std::byte> LentReshard::blob() const {
  if (!opening_.config.counts_steps) return whole_->content().blob;
  std::vector<std::string> wholes;
  for (const UnitSpec& unit : model_.units) wholes.push_back(unit.params.front().whole->name);
  return joined_blob(whole_->ranks(), wholes);
}

/// Values of a parameter that is no part of a tensor.
void LentReshard::read_own(std::size_t param, std::uint64_t first, std::span<float> values) const {
  const TypedSpan<std::byte>& own = opening_.params[param];
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = own.bytes.empty() ? 0.0F : value_at(own.dtype, own.bytes.data(), first + i);
}

std::unique_ptr<LentEngineImpl> LentReshard::make(const EngineConfig& beside) {
  const PieceSource::ReadOwn own = [this](std::size_t param, std::uint64_t first,
                                          std::span<float> values) {
    read_own(param, first, values);
  };
  PieceSource source(*whole_, parts(), blob(), own);
  auto engine =
      std::make_unique<LentEngineImpl>(opening_.model, beside, opening_.runtime, opening_.device);
  engine->open(opening_.params, &source, {.continues_line = true, .in_place = true});
  if (std::string note = note_of_own(); !note.empty())
    engine->state().notes().push_back(std::move(note));
  return engine;
}

/// Says which parameters of this rank the division cannot carry over; empty if it carries all.
std::string LentReshard::note_of_own() const {
  std::vector<std::string_view> own;
  for (const UnitSpec& unit : model_.units)
    if (unit.params.front().whole->name.empty()) own.push_back(unit.name);
  if (own.empty()) return "";
  const std::size_t shown = std::min(own.size(), kNamesShown);
  return fmt::format(
      "'{}'{} on this rank belong{} to no whole tensor (`pieces` has null), so the division could "
      "not find their state in the old store, and it is gone: they have the values that were given "
      "now, and their optimizer state and counts of steps begin anew",
      fmt::join(std::span(own).first(shown), "', '"),
      shown < own.size() ? fmt::format(" and {} more", own.size() - shown) : "",
      own.size() == 1 ? "s" : "");
}

}  // namespace

std::unique_ptr<LentEngineImpl> resharded(const LentOpening& opening) {
  LentReshard its(opening);
  const ReshardInPlace::Judge judge{
      .fits = [&](const TrainingState&, StoredState& stored) { return its.fits(stored); },
      .require = [&](StoredState& stored) { its.require(stored); },
      .require_together = [&](Communicator& ranks) { return its.require_together(ranks); }};
  ReshardInPlace reshard(opening.model, opening.config, opening.runtime, opening.device,
                         TrainingState::Division::kPieces, judge);
  const auto make = [&](const ModelSpec&, const EngineConfig& beside, StoredState&) {
    return its.make(beside);
  };
  return reshard.run<LentEngineImpl>(make);
}

}  // namespace ziggurat
