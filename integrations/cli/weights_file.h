// SPDX-License-Identifier: Apache-2.0
// integrations/cli/weights_file.h: the parameters of a state, whatever holds it, as one safetensors
// file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "core/checkpoint/state_source.h"
#include "core/engine/runtime.h"
#include "integrations/cli/console.h"

namespace ziggurat::cli {

struct WeightsFile {
  std::string path;
  std::optional<DType> dtype;  ///< none: weights alone as they are, a run's masters in fp32
  bool overwrite = false;
  std::map<std::string, std::string> metadata{{"format", "pt"}};
};
struct WrittenWeights {
  std::uint64_t parameters = 0;
  std::uint64_t size_bytes = 0;
};
/// Tensor by tensor, in the order of `from`. Errors: SafetensorsWriter's and the source's; no file
/// is there then that was not before.
WrittenWeights write_weights(Runtime& runtime, StateSource& from, const WeightsFile& file,
                             Console& console);

}  // namespace ziggurat::cli
