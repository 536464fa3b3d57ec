// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/shard_plan.cc: cuts slices into boxes, and deals the boxes out to files.
#include "core/checkpoint/shard_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/checksum.h"
#include "core/checkpoint/safetensors_writer.h"

namespace ziggurat {
namespace {

/// Returns a part's box as boxes of the whole parameter: one, or one for each fused section.
std::vector<TensorBox> whole_boxes(const ParamSpec& param, TensorPart part, const TensorBox& box) {
  if (part.ranks == 1 || param.tp_dim < 0) return {box};
  const auto d = static_cast<std::size_t>(param.tp_dim);
  const std::int64_t section = param.shape[d] / param.tp_sections;
  std::vector<TensorBox> boxes;
  for (std::int64_t s = 0; s < param.tp_sections; ++s) {
    const std::int64_t begin = std::max(box.offsets[d], s * section);
    const std::int64_t end = std::min(box.offsets[d] + box.shape[d], (s + 1) * section);
    if (begin >= end) continue;
    TensorBox its = box;
    its.offsets[d] = (s * part.ranks + part.rank) * section + (begin - s * section);
    its.shape[d] = end - begin;
    boxes.push_back(std::move(its));
  }
  return boxes;
}

/// Cuts a box into boxes of at most `count_max` elements, across the first dimension that can be
/// cut.
void cut_box(TensorBox box, std::uint64_t count_max, std::vector<TensorBox>& boxes) {
  while (box.count() > count_max) {
    const auto d = static_cast<std::size_t>(
        std::ranges::find_if(box.shape, [](std::int64_t n) { return n > 1; }) - box.shape.begin());
    const std::uint64_t row = box.count() / static_cast<std::uint64_t>(box.shape[d]);
    const auto rows = static_cast<std::int64_t>(std::max<std::uint64_t>(1, count_max / row));
    TensorBox first = box;
    first.shape[d] = std::min(rows, box.shape[d] - 1);
    box.offsets[d] += first.shape[d];
    box.shape[d] -= first.shape[d];
    cut_box(std::move(first), count_max, boxes);
  }
  boxes.push_back(std::move(box));
}

/// Room that is left in each file, by its number: a tree in which each node has the most room of
/// the nodes below it.
class Rooms {
 public:
  static constexpr std::size_t kNone = SIZE_MAX;

  void add(std::uint64_t bytes) {
    if (count_ == leaves_) grow();
    set(count_++, bytes);
  }
  void set(std::size_t file, std::uint64_t bytes) {
    std::size_t node = leaves_ + file;
    most_[node] = bytes;
    while ((node /= 2) > 0) most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
  }
  /// Returns the first file from `file` on that has room for `bytes`, which must not be 0.
  std::size_t first(std::size_t file, std::uint64_t bytes) const {
    if (file >= count_) return kNone;
    std::size_t node = leaves_ + file;
    while (most_[node] < bytes) {
      // Go up until there is a neighbour to the right.
      while (node % 2 == 1) node /= 2;
      if (node == 0) return kNone;
      ++node;
    }
    while (node < leaves_) node = 2 * node + (most_[2 * node] >= bytes ? 0 : 1);
    return node - leaves_;
  }

 private:
  void grow() {
    const std::vector<std::uint64_t> before(
        most_.begin() + static_cast<std::ptrdiff_t>(leaves_),
        most_.begin() + static_cast<std::ptrdiff_t>(leaves_ + count_));
    leaves_ *= 2;
    most_.assign(2 * leaves_, 0);
    for (std::size_t file = 0; file < before.size(); ++file) set(file, before[file]);
  }

  std::size_t leaves_ = 1;
  std::size_t count_ = 0;
  // the children of node n are 2 n and 2 n + 1
  std::vector<std::uint64_t> most_ = std::vector<std::uint64_t>(2);
};

/// Deals pieces out to files.
class ShardFiles {
 public:
  ShardFiles(const std::vector<StateTensor>& tensors, const SavingRank& rank,
             std::uint64_t bytes_max)
      : tensors_(tensors), rank_(rank), bytes_max_(bytes_max) {}

  void add(std::uint32_t tensor, const TensorBox& box) {
    const std::uint64_t size = size_bytes(tensors_[tensor].type);
    std::vector<TensorBox> boxes;
    cut_box(box, std::max<std::uint64_t>(1, bytes_max_ / size), boxes);
    for (TensorBox& its : boxes) {
      const std::uint64_t bytes = its.count() * size;
      const std::size_t file = file_for(tensor, bytes);
      files_[file].tensors.insert(tensor);
      files_[file].size_bytes += bytes;
      rooms_.set(file, bytes_max_ - std::min(bytes_max_, files_[file].size_bytes));
      plan_.pieces.push_back({.tensor = tensor,
                              .file = static_cast<std::uint32_t>(file),
                              .offset_bytes = 0,
                              .box = std::move(its),
                              .hashed = {}});
    }
  }

  ShardPlan take() {
    name_files();
    return std::move(plan_);
  }

 private:
  struct File {
    std::set<std::uint32_t> tensors;
    std::uint64_t size_bytes = 0;
  };

  /// Returns the first file with room that has nothing of the tensor yet, or a new file.
  std::size_t file_for(std::uint32_t tensor, std::uint64_t bytes) {
    std::size_t file = rooms_.first(0, bytes);
    while (file != Rooms::kNone && files_[file].tensors.contains(tensor))
      file = rooms_.first(file + 1, bytes);
    if (file != Rooms::kNone) return file;
    files_.emplace_back();
    rooms_.add(bytes_max_);
    return files_.size() - 1;
  }

  /// Names all files. Pieces of wider types come first, so that each value lies on a multiple of
  /// its size.
  void name_files() {
    const auto width = [&](const StatePiece& piece) {
      return size_bytes(tensors_[piece.tensor].type);
    };
    std::ranges::stable_sort(plan_.pieces, [&](const StatePiece& a, const StatePiece& b) {
      return a.file != b.file ? a.file < b.file : width(a) > width(b);
    });
    const std::span<StatePiece> all(plan_.pieces);
    for (std::size_t begin = 0, end = 0; begin < all.size(); begin = end) {
      while (end < all.size() && all[end].file == all[begin].file) ++end;
      name_file(all.subspan(begin, end - begin));
    }
  }

  /// Names the file that has these pieces, and makes its header.
  void name_file(std::span<StatePiece> pieces) {
    std::vector<SafetensorsTensor> tensors;
    std::string offsets;
    std::uint64_t at = 0;
    for (StatePiece& piece : pieces) {
      const StateTensor& tensor = tensors_[piece.tensor];
      tensors.push_back({.name = tensor.name, .type = tensor.type, .shape = piece.box.shape});
      offsets += fmt::format("{}{}:{{\"saved_offsets\":[{}]}}", offsets.empty() ? "" : ",",
                             nlohmann::json(tensor.name).dump(), fmt::join(piece.box.offsets, ","));
      piece.offset_bytes = at;
      at += piece.box.count() * size_bytes(tensor.type);
    }
    // PyTorch's distributed checkpoint looks for this metadata in a shard (_HFStorageReader).
    plan_.headers.push_back(safetensors_header(
        tensors, {{"format", "pt"}, {"DCP_SHARDING_INFO", "{" + offsets + "}"}}));
    const std::string& header = plan_.headers.back();
    for (StatePiece& piece : pieces) piece.offset_bytes += header.size();
    plan_.files.push_back({.name = fmt::format("rank-{:05}-of-{:05}-{:05}.safetensors", rank_.rank,
                                               rank_.ranks, pieces.front().file),
                           .size_bytes = header.size() + at,
                           .header_bytes = header.size(),
                           .header_hash = hash64(std::as_bytes(std::span(header)), 0)});
  }

  const std::vector<StateTensor>& tensors_;
  SavingRank rank_;
  std::uint64_t bytes_max_;
  std::vector<File> files_;
  Rooms rooms_;
  ShardPlan plan_;
};

class Planner {
 public:
  Planner(const ChunkTable& table, const ChunkRuns& runs, const SavingRank& rank,
          std::uint64_t shard_bytes_max)
      : table_(table),
        runs_(runs),
        chunks_(table, rank),
        files_(runs.tensors(), rank, shard_bytes_max) {}

  ShardPlan plan() {
    for (UnitId unit = 0; unit < table_.unit_count(); ++unit) add_unit(unit);
    return files_.take();
  }

 private:
  /// Returns the elements of the unit whose chunks this rank writes: one range, because slices are
  /// ranges.
  ElementRun range_of(UnitId unit) const {
    const UnitChunks& chunks = table_.unit(unit);
    ElementRun range{0, 0};
    for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
      if (!chunks_.writes(id) || table_.real_count(id) == 0) continue;
      const std::uint64_t begin = table_.chunk(id).begin;
      if (range.end == 0) range.begin = begin;
      range.end = begin + table_.real_count(id);
    }
    return range;
  }

  void add_unit(UnitId id) {
    const ElementRun range = range_of(id);
    if (range.end == 0) return;
    const UnitSpec& unit = table_.model().units[id];
    for (std::size_t p = 0; p < unit.params.size(); ++p) {
      const ParamSpec& param = unit.params[p];
      const std::uint64_t begin = table_.param_begins(id)[p];
      const std::uint64_t from = std::max(begin, range.begin);
      const std::uint64_t to = std::min(begin + param.count(), range.end);
      if (from < to && chunks_.writes(param)) {
        for (const TensorBox& part : boxes_of(param.shape, from - begin, to - from)) {
          for (const TensorBox& whole : whole_boxes(param, table_.sharding().tensor, part))
            add_box(id, p, whole);
        }
        if (unit.own_blocks) add_scales(id, p, {from - begin, to - begin});
      }
    }
    if (!unit.own_blocks) add_scales(id, 0, range);
  }

  /// Adds the scales of elements of a unit, or of a parameter that has its own.
  void add_scales(UnitId id, std::size_t param, const ElementRun& range) {
    for (std::size_t a = 0; a < runs_.arrays().size(); ++a) {
      const StateArray& array = runs_.arrays()[a];
      const int tensor = array.is_scale() ? runs_.tensor(a, id, param) : -1;
      if (tensor < 0) continue;
      const auto first = static_cast<std::int64_t>(range.begin / array.block);
      const auto end = static_cast<std::int64_t>(array.values_of(range.end));
      files_.add(static_cast<std::uint32_t>(tensor), {{first}, {end - first}});
    }
  }

  void add_box(UnitId unit, std::size_t param, const TensorBox& box) {
    for (std::size_t a = 0; a < runs_.arrays().size(); ++a) {
      const int tensor = runs_.arrays()[a].is_scale() ? -1 : runs_.tensor(a, unit, param);
      if (tensor >= 0) files_.add(static_cast<std::uint32_t>(tensor), box);
    }
  }

  const ChunkTable& table_;
  const ChunkRuns& runs_;
  WrittenChunks chunks_;
  ShardFiles files_;
};

}  // namespace

std::uint64_t ShardPlan::size_bytes() const noexcept {
  std::uint64_t total = 0;
  for (const StateFile& file : files) total += file.size_bytes;
  return total;
}

bool WrittenChunks::writes(ChunkId chunk) const noexcept {
  if (rank_.replica != 0) return false;
  if (table_.slices_held() == 1) return true;
  const Chunk& its = table_.chunk(chunk);
  const std::uint64_t slice = its.begin / table_.unit(its.unit).slice_count;
  return slice == static_cast<std::uint64_t>(table_.sharding().rank);
}

ShardPlan plan_shards(const ChunkTable& table, const ChunkRuns& runs, const SavingRank& rank,
                      std::uint64_t shard_bytes_max) {
  return Planner(table, runs, rank, shard_bytes_max).plan();
}

ShardPlan plan_whole_tensors(const std::vector<StateTensor>& tensors,
                             std::uint64_t shard_bytes_max) {
  std::vector<TensorBoxes> all;
  for (std::uint32_t t = 0; t < tensors.size(); ++t)
    all.push_back({.tensor = t, .boxes = {whole_box(tensors[t].shape)}});
  return plan_boxes(tensors, all, SavingRank{}, shard_bytes_max);
}

ShardPlan plan_boxes(const std::vector<StateTensor>& tensors, const std::vector<TensorBoxes>& parts,
                     const SavingRank& rank, std::uint64_t shard_bytes_max) {
  ShardFiles files(tensors, rank, shard_bytes_max);
  for (const TensorBoxes& part : parts) {
    for (const TensorBox& box : part.boxes) files.add(part.tensor, box);
  }
  return files.take();
}

}  // namespace ziggurat
