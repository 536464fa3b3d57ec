// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/safetensors_fuzz.cc: a header is refused, or every tensor lies in its file.
#include "core/checkpoint/safetensors_header.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ziggurat;
  // The first byte says how much data follows the header; what is left is the JSON.
  if (size == 0) return 0;
  const std::uint64_t data_bytes = data[0];
  fuzz::taken([&] {
    const SafetensorsHeader header =
        parse_safetensors_header(fuzz::text_of(data + 1, size - 1), data_bytes, "fuzz");
    std::uint64_t end = 0;
    for (const StoredTensor& tensor : header.tensors) {
      fuzz::require(tensor.offset_bytes == end);
      end += tensor.size_bytes;
    }
    fuzz::require(end == data_bytes);
  });
  fuzz::taken([&] { safetensors_json_bytes(fuzz::text_of(data, size), size, "fuzz"); });
  return 0;
}
