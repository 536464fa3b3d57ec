// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/program.h: the program `device_mlp`. It trains mlp.h on a text, on a GPU
// or on the emulated device, and prints each step's loss with its bits, so that the output of two
// runs can be compared.
#pragma once

#include <iosfwd>
#include <string>

#include "base/bytes.h"
#include "integrations/device_mlp/mlp.h"

namespace ziggurat::device_mlp {

struct ProgramOptions {
  std::string text_path;
  std::string device = "auto";  ///< "auto", "host" or "cuda:N"
  std::string store = "device_mlp.store";
  std::string placement = "params=host,grads=host,optimizer=nvme";
  std::uint64_t device_memory_bytes = 64 * kMiB;
  std::uint64_t host_memory_bytes = 256 * kMiB;
  std::uint64_t steps = 20;  ///< in all, those before a resume included
  float learning_rate = 0.01F;
  MlpShape shape{.rows = 32, .context = 16, .width = 32, .hidden = 256};
};

/// Trains. Errors: kInvalidArgument if the text cannot be read or is too short, and if the device
/// is neither of the three; and those of an engine's opening and steps.
void train(const ProgramOptions& options, std::ostream& out);

}  // namespace ziggurat::device_mlp
