// SPDX-License-Identifier: Apache-2.0
// collectives/mesh.h: the ranks as a grid of pp x dp x cp x tp, and the groups of each rank.
//
// Arithmetic only: nothing is sent. Communicator::split() takes the lists. Ranks are numbered with
// tp fastest, then cp, dp, pp, because neighbours mostly share a node and should exchange the most
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

/// The axes in the order of MeshShape's text, which is not the order of numbering.
enum class Axis : std::uint8_t { kData, kTensor, kPipeline, kContext };
/// Returns an axis's name: "dp", "tp", "pp", "cp".
std::string_view to_string(Axis axis) noexcept;

/// The number of ranks along each axis.
struct MeshShape {
  int dp = 1;  ///< replicas of the model, over which ZeRO shards its state
  int tp = 1;  ///< parts of each layer
  int pp = 1;  ///< stages of layers; above 1 is not supported yet
  int cp = 1;  ///< parts of each sequence; above 1 is not supported yet

  friend bool operator==(const MeshShape&, const MeshShape&) = default;
};
/// Formats a shape: "dp 4 x tp 2 x pp 1 x cp 1".
std::string to_string(const MeshShape& shape);

/// Returns the shape of `world_size` ranks, with dp computed from the other axes; dp of `shape` is
/// not read. Errors: kInvalidArgument, with the arithmetic, if they do not divide the world.
MeshShape with_dp_of_world(MeshShape shape, int world_size);

struct WorldSize {
  int ranks = 1;
  int ranks_per_node = 1;  ///< ranks of every node but the last, which may have fewer
};

/// A group cut into parts: `inner` is the rank's part, `outer` its counterparts in all parts. Both
/// are in order and include the rank itself.
struct SubGroups {
  std::vector<int> inner;
  std::vector<int> outer;
};

/// A rank's place on the grid, and its groups. Both groups are in order and include the rank
/// itself.
struct Place {
  int rank = 0;                      ///< number among all ranks
  int data = 0;                      ///< place in data_group
  int tensor = 0;                    ///< place in tensor_group
  std::vector<int> data_group{0};    ///< ranks with the same part of each layer and other data
  std::vector<int> tensor_group{0};  ///< ranks with the same data and the other parts of each layer

  int data_ranks() const noexcept { return static_cast<int>(data_group.size()); }
  int tensor_ranks() const noexcept { return static_cast<int>(tensor_group.size()); }
};
/// Returns the place of `rank` if every `tensor` neighbours of `world_size` divide each layer among
/// them, and these groups see different data. Errors: kInvalidArgument if `tensor` does not divide
/// the world.
Place place_of(int rank, int world_size, int tensor);

class Mesh {
 public:
  /// Errors: kInvalidArgument, with the arithmetic, unless the product of the axes is the world;
  /// kUnimplemented for pp or cp above 1.
  Mesh(const MeshShape& shape, const WorldSize& world);

  const MeshShape& shape() const noexcept { return shape_; }
  int size(Axis axis) const noexcept;
  /// Returns the place of `rank` along `axis`, from 0.
  int index(int rank, Axis axis) const noexcept;
  int node(int rank) const noexcept { return rank / world_.ranks_per_node; }

  Place place(int rank) const;
  /// Returns the ranks that differ from `rank` along `axis` only, in their order along it.
  std::vector<int> group(int rank, Axis axis) const;
  /// Returns every group along `axis`, each once.
  std::vector<std::vector<int>> groups(Axis axis) const;

  /// Cuts `members` by node. Errors: kInvalidArgument unless every node has the same number of
  /// members: otherwise their counterparts are not defined.
  SubGroups by_node(int rank, std::span<const int> members) const;
  /// Returns whether a group along `axis` has ranks on several nodes.
  bool spans_nodes(Axis axis) const;
  /// Returns what a user should know before the run; empty if there is nothing. At present, the
  /// only warning is tensor parallelism over the network.
  std::string warning() const;

 private:
  MeshShape shape_;
  WorldSize world_;
};

/// Cuts `members` into runs of `size` consecutive ones. inner is `rank`'s run (a hybrid's shard
/// group), outer the ranks with the same place in the other runs (its replicas). Errors:
/// kInvalidArgument unless `size` divides the group, and for a rank that is not in it.
SubGroups in_runs_of(int size, int rank, std::span<const int> members);

}  // namespace ziggurat
