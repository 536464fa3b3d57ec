// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_content.h: what a copy of a model's training state contains, whether a
// checkpoint, a store or a file of weights holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "core/checkpoint/state_line.h"
#include "core/checkpoint/tensor_type.h"
#include "optimizer/state_kind.h"

namespace ziggurat {

/// One array over one parameter or, if it holds scales, over one unit.
struct StateTensor {
  /// Its name where all tensors are in one place: a master has its parameter's name, any other
  /// array has state_tensor_name().
  std::string name;
  std::string owner;  ///< the parameter; for scales, the unit
  std::string array;  ///< "master", "exp_avg", "exp_avg.scale": optimizer/state_arrays.h
  TensorType type = TensorType::kF32;
  std::vector<std::int64_t> shape;  ///< shape of the whole, whoever has parts of it

  std::uint64_t count() const noexcept {
    std::uint64_t total = 1;
    for (const std::int64_t dimension : shape) total *= static_cast<std::uint64_t>(dimension);
    return total;
  }
  std::uint64_t size_bytes() const noexcept { return count() * ziggurat::size_bytes(type); }
  friend bool operator==(const StateTensor&, const StateTensor&) = default;
};
/// "optimizer.exp_avg.wte.weight".
std::string state_tensor_name(const std::string& array, const std::string& owner);

/// Parameters that lie one after the other. Blocks of scales are counted from where a unit begins.
struct StateUnit {
  std::string name;
  std::vector<std::string> params;
  friend bool operator==(const StateUnit&, const StateUnit&) = default;
};

/// How the state lay among ranks when it was saved. Only people read this: a load does not need it.
struct SavedLayout {
  int ranks = 1;
  int tensor_parallel = 1;
  int zero_stage = 0;
  int shard_group = 1;
  std::string placement;
  friend bool operator==(const SavedLayout&, const SavedLayout&) = default;
};

struct StateContent {
  std::string model;               ///< ModelSpec::name
  DType dtype = DType::kBFloat16;  ///< type of the parameters that a trainer is given
  std::optional<StateKind> state;  ///< empty for weights alone
  std::optional<Roundings> rounding = std::nullopt;  ///< ChunkTable::rounding()
  std::vector<StateUnit> units;                      ///< in order; empty if they are not known
  std::vector<StateTensor> tensors;
  std::uint64_t step = 0;       ///< finished optimizer steps
  std::vector<std::byte> blob;  ///< the trainer's own
  std::string run_identity;     ///< EngineConfig::run_identity
  std::string numerics_fingerprint;
  SavedLayout layout;
  /// What a trainer says of its run beside the blob, for tools and people: JSON texts by name, with
  /// the names of kResumeNames.
  std::map<std::string, std::string> resume;
  std::map<std::string, std::string> versions;  ///< "ziggurat": "0.1.0"
  std::optional<StateLine> line{};  ///< empty if the state was saved before there were lines

  friend bool operator==(const StateContent&, const StateContent&) = default;
};

}  // namespace ziggurat
