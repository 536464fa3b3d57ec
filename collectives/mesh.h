// SPDX-License-Identifier: Apache-2.0
// collectives/mesh.h: the ranks as a grid of pp x dp x cp x tp, and who is in a group with whom.
//
// Arithmetic only: nothing here talks. Communicator::split() takes the lists. Ranks are numbered
// with tp fastest, then cp, dp, pp, so that neighbours, who mostly share a node, talk most
// (Megatron-LM's order):
//
//   dp 2 x tp 2 on 4 ranks:   tp groups {0,1} {2,3}    dp groups {0,2} {1,3}
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat {

/// In the order of MeshShape's text; not that of the numbering.
enum class Axis : std::uint8_t { kData, kTensor, kPipeline, kContext };
/// "dp", "tp", "pp", "cp".
std::string_view to_string(Axis axis) noexcept;

/// Ranks along each axis.
struct MeshShape {
  int dp = 1;  ///< replicas of the model, over which ZeRO shards its state
  int tp = 1;  ///< parts of each layer
  int pp = 1;  ///< stages of layers; above 1 not built yet
  int cp = 1;  ///< parts of each sequence; above 1 not built yet

  friend bool operator==(const MeshShape&, const MeshShape&) = default;
};
/// "dp 4 x tp 2 x pp 1 x cp 1".
std::string to_string(const MeshShape& shape);

/// The shape of `world_size` ranks where dp is what the other axes leave; dp of `shape` is not
/// read. Errors: kInvalidArgument if they do not divide the world, with the arithmetic.
MeshShape with_dp_of_world(MeshShape shape, int world_size);

struct WorldSize {
  int ranks = 1;
  int ranks_per_node = 1;  ///< of every node but the last, which may have fewer
};

/// A group cut in two: with whom a rank shares a part, and its counterparts in the other parts.
/// Both in order, both with the rank itself.
struct SubGroups {
  std::vector<int> inner;
  std::vector<int> outer;
};

/// Where a rank stands on the grid, and with whom it shares what. Both groups are in order and have
/// the rank itself.
struct Place {
  int rank = 0;                      ///< of all
  int data = 0;                      ///< in data_group
  int tensor = 0;                    ///< in tensor_group
  std::vector<int> data_group{0};    ///< the same part of each layer, other data
  std::vector<int> tensor_group{0};  ///< the same data, the other parts of each layer

  int data_ranks() const noexcept { return static_cast<int>(data_group.size()); }
  int tensor_ranks() const noexcept { return static_cast<int>(tensor_group.size()); }
};
/// The place of `rank`, where each `tensor` neighbours of `world_size` divide every layer and the
/// others see other data. Errors: kInvalidArgument if they do not divide the world.
Place place_of(int rank, int world_size, int tensor);

class Mesh {
 public:
  /// Errors: kInvalidArgument, with the arithmetic, unless the axes multiply to the world;
  /// kUnimplemented for pp or cp above 1.
  Mesh(const MeshShape& shape, const WorldSize& world);

  const MeshShape& shape() const noexcept { return shape_; }
  int size(Axis axis) const noexcept;
  /// Where `rank` stands along `axis`, from 0.
  int index(int rank, Axis axis) const noexcept;
  int node(int rank) const noexcept { return rank / world_.ranks_per_node; }

  Place place(int rank) const;
  /// The ranks that differ from `rank` along `axis` only, in their order along it.
  std::vector<int> group(int rank, Axis axis) const;
  /// Every group along `axis`, each once.
  std::vector<std::vector<int>> groups(Axis axis) const;

  /// `members` cut by node. Errors: kInvalidArgument unless every node has as many of them: their
  /// counterparts would not be defined.
  SubGroups by_node(int rank, std::span<const int> members) const;
  /// Some group along `axis` has ranks on several nodes.
  bool spans_nodes(Axis axis) const;
  /// What a user should know before the run; empty: nothing. Today: tensor parallelism over the
  /// network.
  std::string warning() const;

 private:
  MeshShape shape_;
  WorldSize world_;
};

/// `members` cut into runs of `size` consecutive ones: inner is `rank`'s run (a hybrid's shard
/// group), outer those who hold the same place in the other runs (its replicas).
/// Errors: kInvalidArgument unless `size` divides the group, and for a rank that is not in it.
SubGroups in_runs_of(int size, int rank, std::span<const int> members);

}  // namespace ziggurat
