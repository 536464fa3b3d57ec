// SPDX-License-Identifier: Apache-2.0
// integrations/cli/weights_file.cc: writes the masters of a state, a slice at a time.
#include "integrations/cli/weights_file.h"

#include <utility>
#include <vector>

#include "core/checkpoint/safetensors_writer.h"
#include "core/checkpoint/tensor_values.h"
#include "integrations/cli/checkpoint_files.h"

namespace ziggurat::cli {
namespace {

TensorType type_of(const WeightsFile& file, const StateContent& content,
                   const StateTensor& tensor) {
  if (file.dtype) return tensor_type(*file.dtype);
  return content.state ? TensorType::kF32 : tensor.type;
}

Task<> copy_tensor(StateSource& from, std::size_t tensor, TensorType type,
                   SafetensorsWriter& writer) {
  const TensorType saved = from.content().tensors[tensor].type;
  const Slice take = [&](const TensorRun& run, std::span<const std::byte> bytes) -> Task<> {
    if (saved == type) {
      writer.append_bits(bytes);
    } else {
      std::vector<float> values(run.count);
      widen(saved, bytes, values);
      writer.append(values);
    }
    co_return;
  };
  co_await for_each_slice(from, tensor, take);
}

}  // namespace

WrittenWeights write_weights(Runtime& runtime, StateSource& from, const WeightsFile& file,
                             Console& console) {
  const StateContent& content = from.content();
  WrittenWeights written;
  std::vector<std::size_t> masters;
  std::vector<SafetensorsTensor> tensors;
  for (std::size_t t = 0; t < content.tensors.size(); ++t) {
    const StateTensor& tensor = content.tensors[t];
    if (tensor.array != "master") continue;
    masters.push_back(t);
    tensors.push_back(
        {.name = tensor.name, .type = type_of(file, content, tensor), .shape = tensor.shape});
    written.parameters += tensor.count();
  }
  const std::vector<SafetensorsTensor> as = tensors;
  SafetensorsWriter writer(file.path, std::move(tensors),
                           {.overwrite = file.overwrite, .metadata = file.metadata});
  for (std::size_t m = 0; m < masters.size(); ++m) {
    runtime.reactor.block_on(copy_tensor(from, masters[m], as[m].type, writer));
    console.progress("writing", writer.written_bytes(), writer.file_bytes());
  }
  writer.finish();
  written.size_bytes = writer.file_bytes();
  return written;
}

}  // namespace ziggurat::cli
