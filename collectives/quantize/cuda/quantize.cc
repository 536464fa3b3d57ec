// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/cuda/quantize.cc: checks sizes and addresses before anything is queued.
#include "collectives/quantize/cuda/quantize.h"

#include "base/check.h"
#include "collectives/quantize/cuda/quantize_programs.h"

namespace ziggurat::cuda {
namespace {

void require_size(QuantizedBits bits, std::size_t size_bytes, std::size_t count) {
  ZIGGURAT_CHECK(size_bytes == quantized_bytes(bits, count), "{} bytes for {} elements of {} bits",
                 size_bytes, count, static_cast<int>(bits));
}

}  // namespace

void quantize(StreamHandle stream, QuantizedBits bits, TypedSpan<const std::byte> values,
              std::span<std::byte> blocks) {
  require_size(bits, blocks.size(), values.count());
  require_aligned("values", values.bytes.data(), size_bytes(values.dtype));
  launch(QuantizeBlocks{bits, values.dtype, values.bytes.data(), values.count(), blocks.data()},
         stream);
}

void dequantize(StreamHandle stream, QuantizedBits bits, std::span<const std::byte> blocks,
                TypedSpan<std::byte> values) {
  require_size(bits, blocks.size(), values.count());
  require_aligned("values", values.bytes.data(), size_bytes(values.dtype));
  launch(DequantizeBlocks{bits, blocks.data(), values.dtype, values.bytes.data(), values.count()},
         stream);
}

void add_dequantized(StreamHandle stream, QuantizedBits bits, std::span<const std::byte> blocks,
                     std::span<float> sums) {
  require_size(bits, blocks.size(), sums.size());
  require_aligned("sums", sums.data(), sizeof(float));
  launch(AddDequantized{bits, blocks.data(), sums.data(), sums.size()}, stream);
}

}  // namespace ziggurat::cuda
