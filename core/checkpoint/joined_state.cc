// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/joined_state.cc: finds which piece of which rank has an element of a whole
// tensor.
#include "core/checkpoint/joined_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/tensor_piece.h"
#include "core/sharding/packing.h"
#include "core/sharding/piece_layout.h"

namespace ziggurat {
namespace {

/// Returns the first element of a piece in the whole tensor, and the one after its last.
std::pair<std::uint64_t, std::uint64_t> bounds_of(const WholePlace& place, std::uint64_t count) {
  if (!place.is_box()) return {place.first, place.first + count};
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  for (std::size_t d = 0; d < place.shape.size(); ++d) {
    const auto size = static_cast<std::uint64_t>(place.shape[d]);
    low = low * size + static_cast<std::uint64_t>(place.offsets[d]);
    high = high * size + static_cast<std::uint64_t>(place.offsets[d] + place.box[d] - 1);
  }
  return {low, high + 1};
}

/// Adds what a piece that is a run has of `run`; both count in values of one array.
void add_of_run(std::uint64_t begin, std::uint64_t end, const TensorRun& run,
                std::vector<TensorRun>& found) {
  const std::uint64_t from = std::max(begin, run.first);
  const std::uint64_t to = std::min(end, run.first + run.count);
  if (from < to)
    found.push_back({.first = from - begin, .count = to - from, .at = run.at + (from - run.first)});
}

/// Adds what a piece that is a box has of `run`.
void add_of_box(const WholePlace& place, const TensorRun& run, std::vector<TensorRun>& found) {
  const TensorBox own{.offsets = place.offsets, .shape = place.box};
  std::uint64_t at = run.at;
  for (const TensorBox& box : boxes_of(place.shape, run.first, run.count)) {
    for_each_common_run(box, own,
                        [&](std::uint64_t in_box, std::uint64_t in_piece, std::uint64_t count) {
                          found.push_back({.first = in_piece, .count = count, .at = at + in_box});
                        });
    at += box.count();
  }
}

/// Whether two pieces of one tensor have an element in common.
bool overlap(const TensorPiece& a, const TensorPiece& b) {
  return std::ranges::any_of(a.boxes, [&](const TensorBox& one) {
    return std::ranges::any_of(
        b.boxes, [&](const TensorBox& other) { return common(one, other).has_value(); });
  });
}

}  // namespace

JoinedState::JoinedState(StoredState& pieces, const char* what)
    : pieces_(pieces), content_(pieces.content()) {
  content_.units.clear();
  content_.tensors.clear();
  if (!content_.state)
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: the store has no optimizer state", pieces.place()));
  arrays_ = state_arrays(*content_.state);
  for (int rank = 0; rank < content_.layout.ranks; ++rank) add_rank(rank, what);
  if (wholes_.empty())
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: no piece of the store belongs to a tensor", pieces.place()));
  for (std::size_t w = 0; w < wholes_.size(); ++w) {
    require_cover(wholes_[w]);
    if (has_codes(content_.state->format)) require_blocks(wholes_[w]);
    describe(wholes_[w], w);
  }
}

void JoinedState::add_rank(int rank, const char* what) {
  const ChunkTable& table = pieces_.table(rank);
  const auto places = places_in(pieces_.layout(rank), table.model());
  if (!places) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: {} is refused, and nothing was changed. The store was made by a version, "
                    "or by a trainer, that does not record to which tensors the pieces of its "
                    "ranks belong: open it with the {} that made it, save a checkpoint with its "
                    "trainer, and load that checkpoint on other ranks",
                    pieces_.place(), what,
                    content_.layout.ranks == 1 ? std::string("rank")
                                               : fmt::format("{} ranks", content_.layout.ranks)));
  }
  if (table.state() != *content_.state)
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: rank {} has another optimizer or format than rank 0",
                            pieces_.place(), rank));
  std::unordered_map<std::string, Of> by_name;
  auto next = places->begin();
  const std::vector<UnitSpec>& units = table.model().units;
  for (UnitId u = 0; u < units.size(); ++u)
    for (std::size_t p = 0; p < units[u].params.size(); ++p)
      by_name[units[u].params[p].name] = {rank, u, p, *next++};
  const ChunkRuns runs(table);
  StoredRank& its = ranks_.emplace_back(StoredRank{.wholes = {}, .blob = pieces_.blob(rank)});
  for (const UnitSpec& unit : unpacked_model(table.model()).units) {
    const Of& of = by_name.at(unit.params.front().name);
    its.wholes.push_back(of.place.name);
    if (!of.place.name.empty()) add_piece(of, runs);
  }
}

void JoinedState::add_piece(const Of& of, const ChunkRuns& runs) {
  const WholePlace& place = of.place;
  const ChunkTable& table = pieces_.table(of.rank);
  const std::uint64_t count = table.model().units[of.unit].params[of.param].count();
  const auto [at, is_new] = by_name_.emplace(place.name, wholes_.size());
  if (is_new) {
    wholes_.push_back({.name = place.name,
                       .shape = place.shape,
                       .dtype = table.dtype(of.unit),
                       .count = whole_box(place.shape).count(),
                       .pieces = {}});
  }
  Whole& whole = wholes_[at->second];
  if (whole.shape != place.shape || whole.dtype != table.dtype(of.unit)) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{}: the ranks' layouts give '{}' different shapes or types",
                            pieces_.place(), place.name));
  }
  const auto [low, high] = bounds_of(place, count);
  Piece piece{.place = place, .count = count, .low = low, .high = high, .tensors = {}};
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const int tensor = runs.tensor(a, of.unit, of.param);
    piece.tensors.push_back(tensor < 0 ? -1
                                       : tensor + static_cast<int>(pieces_.first_tensor(of.rank)));
  }
  whole.pieces.push_back(std::move(piece));
}

/// Sorts the pieces, and forgets what several ranks have alike. Errors: kDataLoss unless they are
/// the whole tensor, each element once.
void JoinedState::require_cover(Whole& whole) const {
  const auto order = [](const Piece& a, const Piece& b) {
    return std::tie(a.low, a.high, a.place.offsets, a.place.box) <
           std::tie(b.low, b.high, b.place.offsets, b.place.box);
  };
  const auto same = [](const Piece& a, const Piece& b) {
    return a.place == b.place && a.count == b.count;
  };
  std::ranges::stable_sort(whole.pieces, order);
  const auto copies = std::ranges::unique(whole.pieces, same);
  whole.pieces.erase(copies.begin(), copies.end());
  std::uint64_t total = 0;
  for (const Piece& piece : whole.pieces) total += piece.count;
  bool once = total == whole.count;
  std::vector<TensorPiece> parts;
  for (const Piece& piece : whole.pieces) {
    if (once) parts.push_back(piece_at(piece.place, piece.count));
  }
  for (std::size_t i = 0; once && i < parts.size(); ++i) {
    for (std::size_t j = i + 1; once && j < parts.size(); ++j) {
      if (whole.pieces[j].low >= whole.pieces[i].high) break;
      once = !overlap(parts[i], parts[j]);
    }
  }
  if (once) return;
  throw Error(ErrorCode::kDataLoss,
              fmt::format("{}: the ranks' pieces of '{}' have {} elements of its {}, or overlap: "
                          "together the ranks must have each element once, or the same pieces",
                          pieces_.place(), whole.name, total, whole.count));
}

/// Throws unless every piece has whole blocks of codes.
void JoinedState::require_blocks(const Whole& whole) const {
  std::uint32_t block = 1;
  for (const StateArray& array : arrays_) block = std::max(block, array.block);
  for (const Piece& piece : whole.pieces) {
    const auto begin = run_begin(piece_at(piece.place, piece.count));
    const bool fits = begin && *begin % block == 0 &&
                      (*begin + piece.count == whole.count || piece.count % block == 0);
    if (fits) continue;
    throw Error(
        ErrorCode::kUnimplemented,
        fmt::format("{}: the state of '{}' is in 8 bits, with a scale for each {} elements, but "
                    "its ranks' pieces are cut within such blocks: open the store with the ranks "
                    "that made it, save a checkpoint with its trainer, and load that checkpoint",
                    pieces_.place(), whole.name, block));
  }
}

/// Adds the tensors of a whole parameter to content_.
void JoinedState::describe(const Whole& whole, std::size_t index) {
  content_.units.push_back({.name = whole.name, .params = {whole.name}});
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const StateArray& array = arrays_[a];
    const int first = whole.pieces.front().tensors[a];
    const bool all = std::ranges::all_of(whole.pieces,
                                         [&](const Piece& piece) { return piece.tensors[a] >= 0; });
    if (!all)
      throw Error(ErrorCode::kDataLoss, fmt::format("{}: a rank lacks '{}' of '{}'",
                                                    pieces_.place(), array.name, whole.name));
    StateTensor tensor{.name = a == 0 ? whole.name : state_tensor_name(array.name, whole.name),
                       .owner = whole.name,
                       .array = array.name,
                       .type = pieces_.content().tensors[static_cast<std::size_t>(first)].type,
                       .shape = whole.shape};
    if (array.is_scale()) tensor.shape = {static_cast<std::int64_t>(array.values_of(whole.count))};
    content_.tensors.push_back(std::move(tensor));
    from_.push_back({.whole = index, .array = a});
  }
}

Task<> JoinedState::read(std::size_t tensor, std::span<const TensorRun> runs,
                         std::span<std::byte> array) {
  const From from = from_[tensor];
  const StateArray& kind = arrays_[from.array];
  for (const Piece& piece : wholes_[from.whole].pieces) {
    std::vector<TensorRun> its;
    // In 8 bits every piece is a run, on blocks.
    const bool is_run = !piece.place.is_box() || kind.is_scale();
    const std::uint64_t low = piece.low / kind.block;
    const std::uint64_t high = kind.values_of(piece.high);
    for (const TensorRun& run : runs) {
      if (run.first >= high || run.first + run.count <= low) continue;
      if (is_run) {
        add_of_run(low, high, run, its);
      } else {
        add_of_box(piece.place, run, its);
      }
    }
    if (its.empty()) continue;
    co_await pieces_.read(static_cast<std::size_t>(piece.tensors[from.array]), its, array);
  }
}

ModelSpec JoinedState::model() const {
  ModelSpec model{.name = content_.model, .units = {}, .dtype = content_.dtype};
  for (const Whole& whole : wholes_) {
    model.units.push_back({.name = whole.name,
                           .params = {{.name = whole.name, .shape = whole.shape}},
                           .dtype = whole.dtype});
  }
  return model;
}

}  // namespace ziggurat
