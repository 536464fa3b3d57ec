// SPDX-License-Identifier: Apache-2.0
// integrations/c/saved_tensors.h: which tensors a checkpoint of an embedder has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/checkpoint/state_content.h"
#include "integrations/c/embedded_checkpoint.h"
#include "optimizer/state_arrays.h"

namespace ziggurat {

/// The tensors of a save, by parameter and array.
class SavedTensors {
 public:
  SavedTensors(const std::vector<EmbeddedSave::Param>& params, const StateKind& kind);
  const std::vector<StateTensor>& all() const noexcept { return all_; }
  std::size_t arrays(std::size_t param) const { return of_[param].size(); }
  std::uint32_t of(std::size_t param, std::size_t array) const { return of_[param].at(array); }
  bool is_scale(std::size_t array) const { return arrays_[array].is_scale(); }
  const std::string& array(std::size_t index) const { return arrays_[index].name; }

 private:
  void add(std::size_t p, const EmbeddedSave::Param& param);

  std::vector<StateArray> arrays_;
  std::vector<StateTensor> all_;
  std::vector<std::vector<std::uint32_t>> of_;
};

}  // namespace ziggurat
