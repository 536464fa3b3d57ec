// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/joined_state.h: the store of a trainer that lends its parameters as whole
// tensors: the pieces of all its ranks, put together by what their layouts say. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/stored_state.h"
#include "core/sharding/model_spec.h"
#include "core/sharding/whole_place.h"

namespace ziggurat {

/// What a rank of a store of pieces has beside its records.
struct StoredRank {
  /// The whole tensor of each of its parameters, in its trainer's order; empty if there is none.
  std::vector<std::string> wholes;
  std::span<const std::byte> blob;  ///< its trainer's
};

class JoinedState final : public StateSource {
 public:
  /// Puts the pieces of `pieces` together, which must outlive this. The blob of content() is rank
  /// 0's. A piece that several ranks have is read from the first of them. Errors: kInvalidArgument,
  /// which says that `what` is refused, for a store whose layouts do not say where its pieces lie;
  /// kUnimplemented for codes of 8 bits that are cut within a block; kDataLoss for pieces that
  /// leave a gap or overlap.
  JoinedState(StoredState& pieces, const char* what);

  const StateContent& content() const noexcept override { return content_; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override;
  std::string place() const override { return pieces_.place(); }

  std::span<const StoredRank> ranks() const noexcept { return ranks_; }
  /// Returns the whole tensors as a trainer that has all of them would lend them.
  ModelSpec model() const;

 private:
  /// A piece of a whole tensor: elements in [low, high).
  struct Piece {
    WholePlace place;
    std::uint64_t count;
    std::uint64_t low, high;
    std::vector<int> tensors;  ///< of pieces_, per array; -1: none
  };
  struct Whole {
    std::string name;
    std::vector<std::int64_t> shape;
    DType dtype;
    std::uint64_t count;
    std::vector<Piece> pieces;
  };
  /// Says where a tensor of content_ is from.
  struct From {
    std::size_t whole;
    std::size_t array;  ///< of arrays_
  };
  void add_rank(int rank, const char* what);
  /// A parameter of a rank.
  struct Of {
    int rank;
    UnitId unit;
    std::size_t param;
    WholePlace place;
  };
  void add_piece(const Of& of, const ChunkRuns& runs);
  void require_cover(Whole& whole) const;
  void require_blocks(const Whole& whole) const;
  void describe(const Whole& whole, std::size_t index);

  StoredState& pieces_;
  StateContent content_;
  std::vector<StateArray> arrays_;
  std::vector<StoredRank> ranks_;
  std::vector<Whole> wholes_;                   // in the order in which ranks name them
  std::map<std::string, std::size_t> by_name_;  // in wholes_
  std::vector<From> from_;                      // per tensor of content_
};

}  // namespace ziggurat
