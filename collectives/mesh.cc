// SPDX-License-Identifier: Apache-2.0
// collectives/mesh.cc: converts ranks to places on the grid and back.
#include "collectives/mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/check.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::array kAxes{Axis::kData, Axis::kTensor, Axis::kPipeline, Axis::kContext};
/// The axes in the order of numbering: neighbours in number differ along the first.
constexpr std::array kFastestFirst{Axis::kTensor, Axis::kContext, Axis::kData, Axis::kPipeline};

int ranks_along(const MeshShape& shape, Axis axis) noexcept {
  switch (axis) {
    case Axis::kData: return shape.dp;
    case Axis::kTensor: return shape.tp;
    case Axis::kPipeline: return shape.pp;
    case Axis::kContext: return shape.cp;
  }
  return 1;
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require_positive(const MeshShape& shape, int world_size) {
  if (world_size < 1) refuse(fmt::format("the world has {} ranks: give 1 or more", world_size));
  for (const Axis axis : kAxes) {
    if (ranks_along(shape, axis) < 1)
      refuse(fmt::format("{} {}: give 1 or more", to_string(axis), ranks_along(shape, axis)));
  }
}

/// Returns the product of the axes in 64 bits, because axes come from a command line.
std::int64_t product(const MeshShape& shape) noexcept {
  std::int64_t ranks = 1;
  for (const Axis axis : kAxes) ranks *= ranks_along(shape, axis);
  return ranks;
}

/// Returns how far apart the numbers of neighbours along `axis` are.
int stride(const MeshShape& shape, Axis axis) noexcept {
  int ranks = 1;
  for (const Axis faster : kFastestFirst) {
    if (faster == axis) break;
    ranks *= ranks_along(shape, faster);
  }
  return ranks;
}

std::size_t place_in(std::span<const int> members, int rank) {
  const auto at = std::ranges::find(members, rank);
  if (at == members.end())
    refuse(fmt::format("rank {} is not in its group of {}", rank, members.size()));
  return static_cast<std::size_t>(at - members.begin());
}

}  // namespace

std::string_view to_string(Axis axis) noexcept {
  switch (axis) {
    case Axis::kData: return "dp";
    case Axis::kTensor: return "tp";
    case Axis::kPipeline: return "pp";
    case Axis::kContext: return "cp";
  }
  return "?";
}

std::string to_string(const MeshShape& shape) {
  return fmt::format("dp {} x tp {} x pp {} x cp {}", shape.dp, shape.tp, shape.pp, shape.cp);
}

MeshShape with_dp_of_world(MeshShape shape, int world_size) {
  shape.dp = 1;
  require_positive(shape, world_size);
  const std::int64_t others = product(shape);
  if (world_size % others != 0) {
    refuse(
        fmt::format("tp {} x pp {} x cp {} = {} does not divide the {} ranks of the "
                    "world: {} would be left over",
                    shape.tp, shape.pp, shape.cp, others, world_size, world_size % others));
  }
  shape.dp = static_cast<int>(world_size / others);
  return shape;
}

Place place_of(int rank, int world_size, int tensor) {
  return Mesh(with_dp_of_world({.tp = tensor}, world_size), {.ranks = world_size}).place(rank);
}

Mesh::Mesh(const MeshShape& shape, const WorldSize& world) : shape_(shape), world_(world) {
  require_positive(shape, world.ranks);
  if (world.ranks_per_node < 1)
    refuse(fmt::format("a node has {} ranks: give 1 or more", world.ranks_per_node));
  if (product(shape) != world.ranks) {
    refuse(fmt::format(
        "{} makes {} ranks, but the world has {}; choose axes whose product is the number of ranks",
        to_string(shape), product(shape), world.ranks));
  }
  if (shape.pp > 1 || shape.cp > 1) {
    throw Error(
        ErrorCode::kUnimplemented,
        fmt::format("{}: {} parallelism is not supported yet; set {} to 1", to_string(shape),
                    shape.pp > 1 ? "pipeline" : "context", shape.pp > 1 ? "pp" : "cp"));
  }
}

int Mesh::size(Axis axis) const noexcept { return ranks_along(shape_, axis); }

int Mesh::index(int rank, Axis axis) const noexcept {
  return rank / stride(shape_, axis) % size(axis);
}

Place Mesh::place(int rank) const {
  return {.rank = rank,
          .data = index(rank, Axis::kData),
          .tensor = index(rank, Axis::kTensor),
          .data_group = group(rank, Axis::kData),
          .tensor_group = group(rank, Axis::kTensor)};
}

std::vector<int> Mesh::group(int rank, Axis axis) const {
  ZIGGURAT_CHECK(rank >= 0 && rank < world_.ranks, "rank {} of {}", rank, world_.ranks);
  const int step = stride(shape_, axis);
  const int first = rank - index(rank, axis) * step;
  std::vector<int> members(static_cast<std::size_t>(size(axis)));
  for (std::size_t i = 0; i < members.size(); ++i) members[i] = first + static_cast<int>(i) * step;
  return members;
}

std::vector<std::vector<int>> Mesh::groups(Axis axis) const {
  std::vector<std::vector<int>> all;
  for (int rank = 0; rank < world_.ranks; ++rank) {
    if (index(rank, axis) == 0) all.push_back(group(rank, axis));
  }
  return all;
}

SubGroups Mesh::by_node(int rank, std::span<const int> members) const {
  std::map<int, std::vector<int>> nodes;
  for (const int member : members) nodes[node(member)].push_back(member);
  const std::vector<int>& inner = nodes[node(rank)];
  const std::size_t place = place_in(inner, rank);
  SubGroups groups{.inner = inner, .outer = {}};
  for (const auto& [number, on_node] : nodes) {
    if (on_node.size() != inner.size()) {
      refuse(
          fmt::format("node {} has {} ranks of a group of {}, but node {} has {}; a group can be "
                      "divided by node only if every node has the same number of its ranks",
                      node(rank), inner.size(), members.size(), number, on_node.size()));
    }
    groups.outer.push_back(on_node[place]);
  }
  return groups;
}

bool Mesh::spans_nodes(Axis axis) const {
  for (int rank = 0; rank < world_.ranks; ++rank) {
    if (node(rank) != node(group(rank, axis).front())) return true;
  }
  return false;
}

std::string Mesh::warning() const {
  if (!spans_nodes(Axis::kTensor)) return {};
  return fmt::format(
      "tensor-parallel groups of {} ranks span nodes of {} ranks, so their exchange in every layer "
      "goes "
      "over the network; tp {} stays within a node",
      shape_.tp, world_.ranks_per_node, std::gcd(shape_.tp, world_.ranks_per_node));
}

SubGroups in_runs_of(int size, int rank, std::span<const int> members) {
  if (size < 1 || members.size() % static_cast<std::size_t>(size) != 0) {
    refuse(
        fmt::format("a group of {} ranks cannot be cut into runs of {} ranks; give a divisor of {}",
                    members.size(), size, members.size()));
  }
  const auto run = static_cast<std::size_t>(size);
  const std::size_t place = place_in(members, rank);
  const auto first = members.begin() + static_cast<std::ptrdiff_t>(place / run * run);
  SubGroups groups{.inner = {first, first + size}, .outer = {}};
  for (std::size_t i = place % run; i < members.size(); i += run)
    groups.outer.push_back(members[i]);
  return groups;
}

}  // namespace ziggurat
