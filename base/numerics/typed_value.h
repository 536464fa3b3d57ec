// SPDX-License-Identifier: Apache-2.0
// base/numerics/typed_value.h: loads and stores one element of an array whose type is known only at
// run time. Kernels over such arrays are compared with these functions, and CUDA's kernels are made
// of them.
#pragma once

#include <cstddef>
#include <cstring>

#include "base/dtype.h"
#include "base/numerics/float16.h"
#include "base/numerics/host_device.h"

namespace ziggurat {

/// Loads element `i` of an array of T. In a kernel the array must be aligned to its elements;
/// elsewhere it needs no alignment.
template <class T>
ZIGGURAT_HOST_DEVICE inline T load_element(const std::byte* values, std::size_t i) noexcept {
  // memcpy, because an array may be written in place under another type, and the compiler must not
  // move a load past such a store.
  T element;
  const void* from = values + i * sizeof(T);
#if defined(__CUDA_ARCH__)
  from = __builtin_assume_aligned(from, sizeof(T));  // without this it copies byte by byte
#endif
  std::memcpy(&element, from, sizeof(T));
  return element;
}
template <class T>
ZIGGURAT_HOST_DEVICE inline void store_element(std::byte* values, std::size_t i,
                                               T element) noexcept {
  void* to = values + i * sizeof(T);
#if defined(__CUDA_ARCH__)
  to = __builtin_assume_aligned(to, sizeof(T));
#endif
  std::memcpy(to, &element, sizeof(T));
}

/// Returns element `i` of an array of `dtype`, widened exactly.
ZIGGURAT_HOST_DEVICE inline float value_at(DType dtype, const std::byte* values,
                                           std::size_t i) noexcept {
  switch (dtype) {
    case DType::kBFloat16: return bf16_to_float(load_element<bf16>(values, i));
    case DType::kFloat16: return fp16_to_float(load_element<fp16>(values, i));
    case DType::kFloat32: break;
  }
  return load_element<float>(values, i);
}

/// Rounds `value` to `dtype` and stores it as element `i`. bf16: nearest, ties away from zero;
/// fp16: nearest, ties to even.
ZIGGURAT_HOST_DEVICE inline void store_value(DType dtype, std::byte* values, std::size_t i,
                                             float value) noexcept {
  switch (dtype) {
    case DType::kBFloat16: return store_element(values, i, float_to_bf16(value));
    case DType::kFloat16: return store_element(values, i, float_to_fp16(value));
    case DType::kFloat32: return store_element(values, i, value);
  }
}

}  // namespace ziggurat
