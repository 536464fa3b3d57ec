// SPDX-License-Identifier: Apache-2.0
// integrations/cli/weights_file.h: writes the parameters of a state, from whatever source, as one
// safetensors file.
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
  /// The type to write. None keeps the types of weights alone, and writes a run's masters in fp32.
  std::optional<DType> dtype;
  bool overwrite = false;
  std::map<std::string, std::string> metadata{{"format", "pt"}};
};
struct WrittenWeights {
  std::uint64_t parameters = 0;
  std::uint64_t size_bytes = 0;
};
/// Writes tensor by tensor, in the order of `from`. Errors: those of SafetensorsWriter and of the
/// source; no new file is left then.
WrittenWeights write_weights(Runtime& runtime, StateSource& from, const WeightsFile& file,
                             Console& console);

}  // namespace ziggurat::cli
